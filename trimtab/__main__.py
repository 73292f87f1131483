"""What does `python -m trimtab` run?"""

import sys


# A worker process runs the start script again, up to its `if __name__`: that imports this file, and no command.
def main() -> int:
    """Return the exit code of this process's command."""
    import trimtab.cli.main

    return trimtab.cli.main.main()


if __name__ == "__main__":
    sys.exit(main())
