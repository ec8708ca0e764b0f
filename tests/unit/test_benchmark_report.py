"""The pure parts of the cluster benchmarks: numbers beside their bars, and the tables that are made of them."""

import json
from pathlib import Path

import pytest

from benchmarks.claims import Bar, Claim, Part, at_least, at_most, beside, results_of
from benchmarks.measure import Samples, TimedElsewhere, interleaved
from benchmarks.replay import Outcome, Setting, count_hits, part_of
from benchmarks.report import Document, Row, block_of, shown, table, with_blocks, with_documents
from cluster.workload import TraceRequest

PLACES = ("engine", "cluster", "broadcast", "index_scale", "disk", "replay", "runs", "missed")
EMPTY_PAGE = "\n".join(f"<!-- begin: {name} -->\n<!-- end: {name} -->" for name in PLACES)
PAGE = Path(__file__).parent.parent.parent / "docs" / "performance.md"


def document_of(benchmark: str, *claims: Claim, **run: object) -> Document:
    facts: dict[str, object] = {
        "date": "2030-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "is_tree_dirty": False,
        "cpu": "Some CPU",
        "num_cores": 2,
        "ram_nbytes": 8 * 2**30,
        "python": "3.11.7",
        "torch": "2.6",
        "ray": None,
        "load_average": {"before": [0.25, 0, 0], "after": [1.5, 0, 0]},
    }
    arguments = {"quick": True, "trace": None, "parts": ["a", "b"], "peer_python": "/somewhere/bin/python"}
    text = json.dumps(
        {
            "benchmark": benchmark,
            "arguments": arguments,
            "run": facts | run,
            "results": results_of({"part": Part(claims, {})}),
        }
    )
    return Document.parse(text, "a test")


def written(name: str, *documents: Document) -> str:
    """What these documents make stand in that place of an empty page."""
    return block_of(with_documents(EMPTY_PAGE, documents), name)


def row_of(claim: Claim) -> Row:
    return Row(**claim.to_json())  # type: ignore[arg-type]  # a row has a claim's fields


class TestClaims:
    @pytest.mark.parametrize(("value", "holds"), [(0.69, False), (0.7, True), (0.71, True)])
    def test_a_lower_bar(self, value: float, holds: bool) -> None:
        assert at_least("n", 0.7).claim(value, value, value).holds is holds

    @pytest.mark.parametrize(("value", "holds"), [(0.69, True), (0.7, True), (0.71, False)])
    def test_an_upper_bar(self, value: float, holds: bool) -> None:
        assert at_most("n", 0.7).claim(value, value, value).holds is holds

    def test_without_a_bar_nothing_holds_or_fails(self) -> None:
        assert beside("n").claim(1, 1, 1).holds is None

    def test_excess_is_in_milliseconds_by_the_medians_with_quartiles_by_rounds(self) -> None:
        case, no_op = Samples((0.003, 0.004, 0.009)), Samples((0.001, 0.002, 0.001))
        claim = at_most("n", 5).of_excess(case, no_op)
        assert claim.value == pytest.approx(3.0)  # 4 - 1
        assert (claim.low, claim.high) == (pytest.approx(2.0), pytest.approx(5.0))  # of 2, 2 and 8

    def test_a_speed_is_the_copys_time_over_the_cases(self) -> None:
        claim = at_least("n", 0.7).of_speed(Samples((0.2, 0.2)), Samples((0.1, 0.1)))
        assert claim.value == pytest.approx(0.5) and claim.unit == "x" and not claim.holds

    def test_milliseconds_are_shared_out(self) -> None:
        assert at_most("n", 1.5).of_milliseconds(Samples((0.064,)), shares=64).value == pytest.approx(1.0)

    def test_results_have_the_claims_of_all_parts_in_order(self) -> None:
        parts = {name: Part([at_most(name, 1).claim(1, 1, 1)], {"of": name}) for name in ("b", "a")}
        results = results_of(parts)
        assert [claim["name"] for claim in results["claims"]] == ["b", "a"]  # type: ignore[index,union-attr,call-overload]
        assert results["measured"] == {"b": {"of": "b"}, "a": {"of": "a"}}


def test_a_case_that_timed_itself_elsewhere_took_that_time() -> None:
    samples = interleaved({"here": lambda: None, "there": lambda: TimedElsewhere(7.0)}, rounds=2)
    assert samples["there"].times_s == (7.0, 7.0)
    assert max(samples["here"].times_s) < 7.0


class TestShown:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (12031, "12,031"), (0.3664, "0.366"), (-0.04, "-0.040"), (18.26, "18.3"), (254.4, "254")],
    )
    def test_three_digits(self, value: float, text: str) -> None:
        assert shown(value) == text

    def test_a_bar_is_as_it_was_chosen(self) -> None:
        assert shown(1.15, "x", exact=True) == "1.15 x"
        assert shown(600_000, "", exact=True) == "600,000"
        assert shown(2_000_000, "/s", exact=True) == "2,000,000 /s"


class TestTable:
    def test_a_row_has_number_bar_value_quartiles_and_verdict(self) -> None:
        claim = Claim("store", 0.65, 0.6, 0.72, "x", Bar.AT_LEAST, 0.7, "of a copy")
        row = table([row_of(claim)]).splitlines()[-1]
        assert row == "| store | ≥ 0.7 x | 0.650 x | 0.600 to 0.720 | **no** | of a copy |"

    def test_a_row_of_one_round_without_a_bar_has_neither_quartiles_nor_verdict(self) -> None:
        assert table([row_of(beside("hits", "").claim(12031, 12031, 12031))]).splitlines()[-1] == (
            "| hits |  | 12,031 |  |  |  |"
        )

    def test_a_bar_in_a_text_does_not_end_its_cell(self) -> None:
        assert "a \\| b" in table([row_of(beside("a | b").claim(1, 1, 1))])


class TestDocuments:
    def test_runs_tell_machine_date_commit_and_arguments_without_paths(self) -> None:
        runs = written("runs", document_of("engine", is_tree_dirty=True)).splitlines()[-1]
        assert "| `engine` | 2030-01-02 | 0123456789 and changes | Some CPU, 2 cores, 8 GiB | 0.2 and 1.5 |" in runs
        assert runs.endswith("| quick, parts a/b, peer python python |")

    def test_runs_stand_in_the_order_of_the_page(self) -> None:
        runs = written("runs", document_of("replay"), document_of("engine"), document_of("cluster"))
        assert [line.split("`")[1] for line in runs.splitlines()[2:]] == ["engine", "cluster", "replay"]

    def test_missed_are_the_claims_that_do_not_hold(self) -> None:
        good, bad = at_most("good", 1).claim(1, 1, 1), at_most("bad", 1).claim(2, 2, 2)
        missed = written("missed", document_of("engine", good, beside("open").claim(9, 9, 9), bad))
        assert "bad" in missed and "good" not in missed and "open" not in missed
        assert written("missed", document_of("engine", good)) == "Every number reached its bar."

    def test_what_the_page_says_of_other_scripts_is_kept(self) -> None:
        slow, slower = (document_of(name, at_most(f"{name}'s", 1).claim(2, 2, 2)) for name in ("cluster", "engine"))
        page = with_documents(with_documents(EMPTY_PAGE, [slow]), [slower])
        assert page == with_documents(EMPTY_PAGE, [slow, slower])
        assert [line.split("`")[1] for line in block_of(page, "runs").splitlines()[2:]] == ["engine", "cluster"]
        assert [line.split(" ")[1] for line in block_of(page, "missed").splitlines()[2:]] == ["engine's", "cluster's"]
        better = document_of("engine", at_most("engine's", 1).claim(1, 1, 1), commit="fedcba9876543210")
        page = with_documents(page, [better])
        assert "fedcba9876" in block_of(page, "runs") and "0123456789" in block_of(page, "runs")
        assert "engine's" not in block_of(page, "missed") and "cluster's" in block_of(page, "missed")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": {"claims": [{"name": "n"}]}}'])
    def test_another_text_is_refused_by_its_source(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"here\.json is no document of a benchmark"):
            Document.parse(text, "here.json")


class TestPage:
    def test_only_the_places_change(self) -> None:
        page = "before\n<!-- begin: a -->\nold\n<!-- end: a -->\nbetween\n<!-- begin: b -->\n<!-- end: b -->\nafter\n"
        written = with_blocks(page, {"a": r"new \1"})
        assert written == page.replace("old", r"new \1")
        assert with_blocks(written, {"a": r"new \1"}) == written

    @pytest.mark.parametrize("page", ["none", "<!-- begin: a --><!-- end: a -->" * 2])
    def test_a_place_is_needed_once(self, page: str) -> None:
        with pytest.raises(ValueError, match=r"the page has \d places <!-- begin: a -->"):
            with_blocks(page, {"a": "new"})

    def test_the_page_has_a_place_for_every_script(self) -> None:
        page = with_blocks(PAGE.read_text(encoding="utf-8"), dict.fromkeys(PLACES, "filled"))
        assert page.count("-->\nfilled\n<!--") == len(PLACES)


class TestReplay:
    def test_hits_are_blocks_that_an_earlier_request_had(self) -> None:
        requests = [TraceRequest((1, 2)), TraceRequest((1, 2, 3)), TraceRequest((4,)), TraceRequest((1, 2, 3, 5))]
        assert count_hits(requests) == 2 + 0 + 3

    def report(self, requests: int, hit_blocks: int) -> dict[str, object]:
        calls = ("lookup", "retrieve", "store")
        latency = {call: {"p50": 1.0, "p95": 2.0, "p99": 3.0} for call in calls}
        latency["retrieve"] = {"p50": None, "p95": None, "p99": None}
        return {
            "requests": requests,
            "world_size": 2,
            "seconds": 19.0,
            "hit_rate": 0.5,
            "hit_blocks": hit_blocks,
            "latency_ms": latency,
        }

    def test_the_whole_trace_has_a_bar_and_an_exact_count(self) -> None:
        part = part_of(Setting(0, "lru"), [Outcome(61.0, self.report(12031, 99))], 100, is_from_trace=True)  # type: ignore[arg-type]
        by_name = {claim.name: claim for claim in part.claims}
        whole = by_name["replay of 12,031 requests on 2 ranks, all blocks, lru"]
        assert (whole.value, whole.bar, whole.holds) == (61.0, 60.0, False)
        exact = by_name["blocks found of those counted from the workload, all blocks, lru"]
        assert (exact.value, exact.holds) == (0.99, False)
        assert not any("retrieve" in name for name in by_name)  # there was none

    @pytest.mark.parametrize(("capacity", "exact"), [(0, 100), (50, None)])
    def test_other_runs_have_no_bar_for_their_time(self, capacity: int, exact: int | None) -> None:
        part = part_of(Setting(capacity, "lru"), [Outcome(9.0, self.report(300, 100))], exact, is_from_trace=True)  # type: ignore[arg-type]
        assert part.claims[0].bar is None
        assert [claim.holds for claim in part.claims if claim.bar is not None] == ([True] if exact else [])
