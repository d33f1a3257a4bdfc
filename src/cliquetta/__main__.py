"""``python -m cliquetta``: the command, where it is not on the path."""

from cliquetta.cli.main import main

if __name__ == "__main__":
    main()
