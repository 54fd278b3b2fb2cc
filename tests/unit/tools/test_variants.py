"""What is compared: which folders are which variant, what a failure says, what the tables say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import configs, deployments, shapes, variants_report
from tools.deployments import pooled
from tools.load import Level, Stream, summarize
from tools.variants import BadVariant, Subject, kv_tokens, reason, subjects


def folder(path: Path, **config: Any) -> Path:
    """A folder with a config."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_folders_are_known_by_their_weights(tmp_path: Path) -> None:
    """A name before them goes first; who has no weights comes last, without a folder."""
    plain = folder(tmp_path / "plain")
    four = folder(tmp_path / "four", quantization_config={"quant_method": "gptq", "bits": 4})
    assert subjects([str(four)], plain) == [
        Subject(variant="fp16", folder=plain),
        Subject(variant="gptq", folder=four),
        Subject(variant="awq", folder=None),
    ]
    assert subjects([f"awq={four}"], None)[0] == Subject(variant="awq", folder=four)
    assert [one.scheme for one in subjects([str(four)], plain)] == ["", "W4A16", ""]


def test_what_is_no_model_or_no_variant_is_refused(tmp_path: Path) -> None:
    """In one sentence."""
    with pytest.raises(BadVariant, match=r"has no config\.json: give folders, or variant=folder"):
        subjects([str(tmp_path)], None)
    with pytest.raises(configs.BadConfig, match="'int3' is no variant"):
        subjects([f"int3={folder(tmp_path / 'a')}"], None)


def test_a_failure_is_one_sentence() -> None:
    """Without how Triton ended, and without the end of its log."""
    epitaph = (
        "tritonserver ended with code 1: Internal: ServingError: W8A16 has no kernel; the end of its log /a:\nI 1\nE"
    )
    assert reason(epitaph) == "W8A16 has no kernel"
    assert reason("serve ended early") == "serve ended early"
    assert reason("tritonserver was killed by SIGSEGV; the end of its log /a") == "tritonserver was killed by SIGSEGV"


def test_the_kv_cache_is_counted_in_tokens() -> None:
    """Blocks times their size, by vLLM's own account."""
    page = '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="16",num_gpu_blocks="250"} 1\n'
    assert kv_tokens(page) == 4_000
    assert kv_tokens("# TYPE other gauge\nother 1\n") is None


def level(streams: int, seconds: float = 1.0) -> Level:
    """One whose streams got eight tokens each, the first after a tenth of the time."""
    messages = [seconds * (place + 1) / 10 for place in range(8)]
    return summarize(8, [Stream(sent=0.0, messages=messages, tokens=8) for _ in range(streams)])


MACHINE = {"date": "2026-01-01", "gpu": None, "cpu": "CPU", "cores": 2, "versions": {"vllm": "0.32"}}


def test_a_table_says_what_could_not_run() -> None:
    """The reason stands in the place of the figures; agreement is with the plain variant."""
    answers = [{"question": "Why?", "text": "So|so.", "tokens": [1, 2]}]
    other = [{"question": "Why?", "text": "No.", "tokens": [1, 3]}]
    blank: dict[str, Any] = {
        "scheme": "",
        "model": "",
        "error": None,
        "load_s": 3.0,
        "weights_mb": 10.0,
        "kv_tokens": 1_000,
    }
    blank |= {"peak_rss_mb": 5.0, "peak_gpu_mb": None, "levels": [vars_of(level(4))], "quality": None}
    rows: list[dict[str, Any]] = [
        blank | {"variant": "fp16", "quality": {"perplexity": 20.5, "scored_tokens": 90, "answers": answers}},
        blank | {"variant": "gptq", "scheme": "W4A16", "quality": {"perplexity": 22, "scored_tokens": 90}},
        blank | {"variant": "awq", "error": "no kernel", "levels": []},
    ]
    rows[1]["quality"]["answers"] = other
    found = {"command": "c", "machine": MACHINE, "plan": {"arguments": {}}, "rows": rows}
    text = variants_report.markdown(found)
    assert "| awq | could not run: no kernel |" in text
    assert "| gptq W4A16 | 22.00 | 90 | 50% | 0% | 1 |" in text
    assert "| fp16 | 20.50 | 90 | 100% | 100% |" in text
    assert "| Why? | So\\|so. | No. |" in text
    assert "Why?" not in variants_report.table(found)
    of_speed = variants_report.table(found).partition("| variant | load s")[2].partition("\n\n")[0].splitlines()
    assert len({line.count("|") for line in of_speed[1:]}) == 1


def test_repeats_are_pooled_over_all_requests() -> None:
    """TTFT's mean and deviation are those of every request of every repeat."""
    found = pooled([level(2, 1.0), level(2, 3.0)])
    assert found.ttft_mean == pytest.approx(200)
    assert found.ttft_sd == pytest.approx(100)
    rows = [{"way": "triton", "error": None, "peak_rss_mb": 5.0, "peak_gpu_mb": None, "levels": [vars_of(found)]}]
    rows.append({"way": "openai", "error": "no port", "peak_rss_mb": None, "peak_gpu_mb": None, "levels": []})
    text = deployments.markdown({"command": "c", "machine": MACHINE, "rows": rows})
    assert "| Triton, gRPC | 2 | 200.0 ± 100.0 |" in text
    assert "| `vllm serve`, openai client | could not run: no port |" in text


def vars_of(one: Level) -> dict[str, Any]:
    """Its fields."""
    return dict(vars(one))


@pytest.mark.parametrize(("x", "y", "best"), [((1, 2, 3), (3, 2, 1), {0, 1, 2}), ((1, 2, 2), (1, 2, 1), {0})])
def test_the_pareto_frontier_is_what_nothing_beats(x: tuple[int, ...], y: tuple[int, ...], best: set[int]) -> None:
    """Less is better in both."""
    assert variants_report.frontier(list(zip(x, y, strict=True))) == best


def test_prompts_have_as_many_characters_as_asked() -> None:
    """128, and all differ."""
    plan = deployments.Plan(arguments={}, streams=(16,), repeats=1, characters=128, max_tokens=1, processes=1)
    prompts = plan.prompts(16, 3)
    assert {len(prompt) for prompt in prompts} == {128}
    assert len(set(prompts)) == 16


def test_shapes_of_a_variant_are_known_by_it(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """Each folder that is written is served by the variant that it is named after."""
    for name, scheme in shapes.FOLDERS.items():
        written = shapes.write(tiny_tokenizer, tmp_path / name, scheme)
        (first, *_) = subjects([str(written)], None)
        assert first.variant == name.partition("-")[0]
        assert first.scheme.lower() == name.partition("-")[2]


@pytest.fixture
def tiny_tokenizer(tmp_path: Path) -> Path:
    """A folder with as much of a tokenizer as is read."""
    made = tmp_path / "tokenizer"
    made.mkdir()
    (made / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}))
    return made
