"""How do people and machines read what a run found? Everything here is drawn from `fsdp_testing.records` alone."""

from fsdp_testing.report.files import check_writable, write_atomically
from fsdp_testing.report.html import write_html
from fsdp_testing.report.json_file import read_json, write_json
from fsdp_testing.report.junit import write_junit
from fsdp_testing.report.summary import conclusion, report_exit_code

__all__ = [
    "check_writable",
    "conclusion",
    "read_json",
    "report_exit_code",
    "write_atomically",
    "write_html",
    "write_json",
    "write_junit",
]
