"""Short for `python -m prime_hpc.commands.doctor`."""

import sys

from prime_hpc.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
