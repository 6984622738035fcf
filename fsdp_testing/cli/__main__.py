"""`python -m fsdp_testing.cli` is `fsdp-verify`, for environments without the script on their path."""

import sys

from fsdp_testing.cli.main import main

sys.exit(main())
