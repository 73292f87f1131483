"""`python -m trimtab` is `trimtab`.

A worker process runs the script that started the command again, up to its `if __name__`: that imports this file, and no command.
"""

import sys


def main() -> int:
    """Return the exit code of the command that this process was started for."""
    import trimtab.cli.main

    return trimtab.cli.main.main()


if __name__ == "__main__":
    sys.exit(main())
