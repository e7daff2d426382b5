"""Measurements of engines from outside this project, and the simulator's predictions of them."""

from simcore import compiled

# Before anything of the core is imported: a table takes a thousand runs.
if not compiled.imported():
    compiled.use()
