"""`python -m simcore`: see simcore.cli."""

from simcore.cli import main

if __name__ == "__main__":
    main()
