"""The report: one HTML page and its Markdown twin, from the JSON files each stage wrote.

It runs no model and opens no weight, so it can be made on any machine that has the folder.
"""

from quantkit.report.write import write_report

__all__ = ["write_report"]
