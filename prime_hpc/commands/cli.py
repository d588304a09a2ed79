"""What every command shares: the RUN argument, and errors as one line."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from prime_hpc.errors import PrimeHPCError

EXIT_ERROR = 2


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the run directory as first argument."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("run", metavar="RUN", type=lambda text: Path(text).absolute(), help="the run's directory")
    return made


def run(command: Callable[[], int]) -> int:
    """The exit code of `command`; 2 where it raises an error of ours, which is printed."""
    try:
        return command()
    except PrimeHPCError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 0
