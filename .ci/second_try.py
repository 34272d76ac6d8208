"""Whether the tests that failed get a second try, alone: python .ci/second_try.py LOG

Tests that start services run side by side in CI, where they starve each other on a slow machine.
Where a whole run ended with a few failures, these tests run once more, one after another. What
fails alone has failed. A run that was interrupted, or in which more failed, gets no second try.
"""

import json
import re
import sys
from collections.abc import Collection
from pathlib import Path

MAX_FAILED = 4
_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_SUMMARY = re.compile(r"^(?:=+ )?(?:(\d+) failed, )?.*?\d+ passed.*? in [\d.]+s", re.MULTILINE)
_ERRORS = re.compile(r"\b(\d+) errors?\b")
_CUT_SHORT = re.compile(r"^!{3,}|INTERNALERROR|node down", re.MULTILINE)


def refusal(log: str, last_failed: Collection[str]) -> str | None:
    """Why there is no second try, or None.

    Args:
        log: what pytest printed.
        last_failed: the tests that pytest's cache names.
    """
    summary = _SUMMARY.search(log)
    if summary is None or _CUT_SHORT.search(log):
        return "the run was cut short"
    errors = _ERRORS.search(summary[0])
    num_failed = int(summary[1] or 0) + int(errors[1] if errors else 0)
    if not 0 < num_failed <= MAX_FAILED:
        return f"{num_failed} failed, and at most {MAX_FAILED} get a second try"
    if len(last_failed) > num_failed or not last_failed:
        return f"{num_failed} failed, and the cache names {len(last_failed)}"
    return None


def main() -> None:
    """Exit with 1, and say why, if there is no second try."""
    log = Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace")
    last_failed = json.loads(_LAST_FAILED.read_text()) if _LAST_FAILED.exists() else {}
    why = refusal(log, last_failed)
    if why is not None:
        sys.exit(f"no second try: {why}")
    print(f"SECOND TRY, alone, of {len(last_failed)}:", *last_failed, sep="\n  ")


if __name__ == "__main__":
    main()
