"""The comparison without and with drafts, through all services and the real model."""

import pytest

from benchmarks.drafts import compare, table

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(300)]


async def test_drafts_change_no_greedy_answer_and_their_worth_is_counted(monkeypatch):
    monkeypatch.setenv("HEADRACE_PARENT_DEATH", "1")
    comparisons = await compare("smollm2-135m-instruct", 3, max_tokens=40, num_runs=1)
    for comparison in comparisons.values():
        assert comparison.drafted.text == comparison.plain.text
        assert comparison.plain.figures.num_draft_tokens == 0
        figures = comparison.drafted.figures
        assert 0 <= figures.num_accepted_draft_tokens <= figures.num_draft_tokens
        assert figures.num_accepted_draft_tokens < figures.num_tokens == 40
    assert comparisons["repetitive"].drafted.figures.num_accepted_draft_tokens > 10
    assert comparisons["repetitive"].acceptance > 0.8
    lines = table(comparisons).splitlines()
    assert [line.split()[0] for line in lines] == ["prompt", "repetitive", "free"]
    assert all(line.endswith("yes") for line in lines[1:])
