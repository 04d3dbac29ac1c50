"""The one error a user is meant to read.

Everything else that is raised is a bug and keeps its traceback.
"""

from __future__ import annotations


class QuantkitError(Exception):
    """Something the user can fix.

    The message says what is wrong, with which name and value, and what to do next, in one or two
    lines. The command line prints it without a traceback and exits with code 2.
    """
