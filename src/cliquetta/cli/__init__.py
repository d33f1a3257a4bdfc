"""The command line: words and options only; what a command does is a function of the library."""

import os

# Threads of a command sleep while they wait for each other. By default they spin, which
# on a machine with other work takes the time that the others need to finish: commands
# then slow down by far more than their share. Read when torch is loaded, which no
# command does before this.
for _name, _value in (
    ("OMP_WAIT_POLICY", "PASSIVE"),
    ("GOMP_SPINCOUNT", "0"),
    ("KMP_BLOCKTIME", "0"),
):
    os.environ.setdefault(_name, _value)
