"""The process that quantizes: loads a model, calibrates, rounds its weights, writes them as a Hugging Face folder.

Started by `tools.quantize`, which reads its log, in the environment of requirements/quantize.txt: the only module that
knows llm-compressor. It reads a Job from standard input, and says what it is at in lines that begin with SAID.
"""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAID, REFUSED = "» ", "refused: "
BATCH = 32  # answers that the model writes side by side
ANSWER_TOKENS, TEXT_TOKENS = 192, 256
SEED = 7


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done. `texts` are the calibration's; without any the model answers `questions` into `written`.

    `bits`, `activation_bits` and `symmetric` say how weights are stored, `group` how many share a scale (0: a channel).
    """

    model: str
    output: str
    variant: str
    bits: int
    activation_bits: int
    symmetric: bool
    group: int
    texts: list[str]
    questions: list[str]
    written: str


class Refused(Exception):
    """The model cannot be quantized; the message says why."""


def say(doing: str) -> None:
    """Tell the parent what goes on now."""
    print(f"{SAID}{doing}", flush=True)


def check_architecture(config: Any, variant: str) -> None:
    """Refuse a model that llm-compressor would not understand. Raises Refused."""
    from llmcompressor.modifiers.transform.awq import AWQ_DYNAMIC_MAPPING_REGISTRY, AWQ_MAPPING_REGISTRY
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    (name,) = config.architectures or ("none",)
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise Refused(f"{name} is no causal language model that transformers knows: choose another model")
    known = {*AWQ_MAPPING_REGISTRY, *AWQ_DYNAMIC_MAPPING_REGISTRY}
    if variant == "awq" and name not in known:
        raise Refused(f"llm-compressor does not know which layers of {name} AWQ may scale: use --variant gptq")


def write_texts(model: Any, tokenizer: Any, job: Job) -> list[str]:
    """Have the model answer the questions, in batches that are kept as they come; goes on where a run before ended."""
    import torch

    path = Path(job.written)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    texts = [json.loads(line)["text"] for line in lines]  # it may have written more for another variant
    tokenizer.padding_side = "left"
    for begin in range(len(texts), len(job.questions), BATCH):
        say(f"the model writes its calibration texts: {begin} of {len(job.questions)}")
        prompts = [_asked(tokenizer, question) for question in job.questions[begin : begin + BATCH]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        torch.manual_seed(SEED + begin)
        with torch.no_grad():
            written = model.generate(
                **batch, max_new_tokens=ANSWER_TOKENS, do_sample=True, temperature=0.8, top_p=0.95, top_k=0
            )
        # The last line is only there when it is whole: it is what a run that was interrupted goes on after.
        answers = tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        new = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        texts += new
        partial = path.with_suffix(".part")
        partial.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
        partial.replace(path)
    return texts[: len(job.questions)]


def _asked(tokenizer: Any, question: str) -> str:
    if not tokenizer.chat_template:
        return question
    message = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def recipe(job: Job) -> list[Any]:
    """The modifiers of llm-compressor that make the job's weights. The output layer stays as it is."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    how: dict[str, Any] = {"strategy": "group", "group_size": job.group} if job.group else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=job.bits, type="int", symmetric=job.symmetric, dynamic=False, **how)
    activations = None
    if job.activation_bits < 16:
        activations = QuantizationArgs(
            num_bits=job.activation_bits, type="int", symmetric=True, dynamic=True, strategy="token"
        )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    shared: dict[str, Any] = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    if job.variant == "gptq":
        return [GPTQModifier(**shared)]
    return [AWQModifier(), QuantizationModifier(**shared)]


def quantize(job: Job) -> None:
    """Do the job. Raises Refused, and what llm-compressor raises."""
    say("importing llm-compressor")
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    check_architecture(AutoConfig.from_pretrained(job.model), job.variant)
    if not torch.accelerator.is_available():  # 0.14 pins memory for AWQ without asking whether there is anything to pin
        IntermediatesCache.pin_memory = lambda self, *_args, **_named: None
    say("loading the model")
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype="auto")
    texts = job.texts or write_texts(model, tokenizer, job)
    say(f"calibrating with {len(texts)} texts")
    rows = [tokenizer(text, truncation=True, max_length=TEXT_TOKENS, add_special_tokens=False) for text in texts]
    samples = Dataset.from_list([{key: row[key] for key in ("input_ids", "attention_mask")} for row in rows])
    oneshot(
        model=model,
        dataset=samples,
        recipe=recipe(job),
        max_seq_length=TEXT_TOKENS,
        num_calibration_samples=len(rows),
        processor=tokenizer,
        log_dir=None,
    )
    say("writing the quantized model")
    model.save_pretrained(job.output, save_compressed=True)
    AutoTokenizer.from_pretrained(job.model).save_pretrained(job.output)


def main() -> int:
    """Read a Job from standard input and do it; returns the exit code."""
    job = Job(**json.load(sys.stdin))
    try:
        quantize(job)
    except Refused as error:
        print(f"{REFUSED}{error}", flush=True)
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"{REFUSED}the disk is full at {job.output}: free some space and run the same command again", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
