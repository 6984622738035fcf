"""How do people and machines read what a run found? Everything here is drawn from `fsdp_testing.cases.records` alone."""

from collections.abc import Callable, Mapping

from fsdp_testing.cases.records import RunReport
from fsdp_testing.report.files import check_writable, write_atomically
from fsdp_testing.report.html import html_text
from fsdp_testing.report.junit import junit_text
from fsdp_testing.report.summary import conclusion, report_exit_code

__all__ = ["TEXTS", "check_writable", "conclusion", "report_exit_code", "write_atomically"]

TEXTS: Mapping[str, Callable[[RunReport], str]] = {
    "--html": html_text,
    "--json": lambda report: report.to_json(indent=1) + "\n",
    "--junit": junit_text,
}
"""Forms of a report as a file, by the option that asks for one."""
