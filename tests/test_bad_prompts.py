"""A bad prompt gets one sentence that names the value, before any work is queued."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import tiny

from lily_mlx.loading import InputError, check_prompt, load


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompt")
    tiny.checkpoint(folder)
    return load(str(folder))[0].args


@pytest.mark.parametrize("make", [list, tuple, mx.array, np.array], ids=lambda f: f.__name__)
def test_good_prompts_pass(args, make):
    check_prompt(make([0, 1, tiny.VOCAB_SIZE - 1]), args)
    check_prompt(make([5] * 512), args)


@pytest.mark.parametrize("source", ["args", "text", "config"])
def test_a_prompt_is_judged_by_any_form_of_the_settings(args, source):
    from mlx_lm.models.qwen3_5 import TextModelArgs

    given = {
        "args": args,
        "text": TextModelArgs.from_dict(args.text_config),
        "config": {"text_config": args.text_config},
    }[source]
    with pytest.raises(InputError, match="token id 288"):
        check_prompt([288], given)


@pytest.mark.parametrize(
    "prompt,words",
    [
        ([], ["no tokens"]),
        (mx.array([], mx.int32), ["no tokens"]),
        ([1, 288, 2], ["token id 288 at position 1", "vocabulary of 288", "0 to 287"]),
        (mx.array([1, 2, 100000]), ["token id 100000 at position 2"]),
        ([-1], ["token id -1"]),
        ([5] * 513, ["513 tokens", "max_position_embeddings is 512"]),
        (mx.array([[1, 2]]), ["shape (1, 2)", "one axis"]),
        (mx.array([1.0]), ["float32", "whole numbers"]),
        ([1, 2.5], ["2.5 at position 1", "whole numbers"]),
        ([[1, 2]], ["[1, 2] at position 0"]),
        ("hi", ["'h' at position 0"]),
    ],
    ids=[
        "empty",
        "empty-array",
        "id",
        "id-array",
        "negative",
        "long",
        "2d",
        "float",
        "mixed",
        "nested",
        "text",
    ],
)
def test_bad_prompts(args, prompt, words):
    with pytest.raises(InputError) as caught:
        check_prompt(prompt, args)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text
