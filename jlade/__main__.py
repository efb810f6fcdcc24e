import sys

from jlade.cli import main

sys.exit(main())
