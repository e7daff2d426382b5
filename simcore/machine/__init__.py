"""The contract of all machines: the verbs that programs call, and the trace of a run."""
