"""Short for `python -m prime_hpc.commands.chat`."""

import sys

from prime_hpc.commands.chat import main

if __name__ == "__main__":
    sys.exit(main())
