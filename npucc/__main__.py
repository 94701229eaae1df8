"""The command `npucc`, also as `python -m npucc`."""

import sys

from npucc import signals


def main() -> int:
    """Run the command line and return its exit code."""
    signals.install()  # first: the import takes a third of a second
    try:
        from npucc.cli import main as run

        return run()
    except signals.Interrupted:
        return signals.exit_code(0)


if __name__ == "__main__":
    sys.exit(main())
