"""What a script would load from a hub is made on request, as large as the real one, and said."""

import json
import os
from pathlib import Path
from textwrap import dedent

from tests.on_stand_in.interpreters import python_with_trl
from tests.on_stand_in.rehearsing import rehearse

ON = ("--gpu", "H100-SXM", "--steps", "1", "--random-weights", "--random-data")

TRAIN = """
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = "Qwen/Qwen3-0.6B-Base"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).cuda()  # dtype "auto"
    assert len(tokenizer) == model.config.vocab_size == 151936
    example = load_dataset("trl-lib/Capybara", split="train")[0]["messages"]
    ids = tokenizer.apply_chat_template(example, return_tensors="pt", return_dict=True)["input_ids"]
    print("tokens", ids.shape, "largest", int(ids.max()) < 151936)
    ids = ids[:, :512].cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
"""


def test_a_script_of_a_hubs_model_and_dataset_needs_neither(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    found = rehearse(
        *ON, "300", "--", "train.py", folder=tmp_path, command=python_with_trl(), HF_HOME=str(tmp_path / "empty")
    )
    # weights, gradients and two moments of 596,049,920 parameters in bf16, and up to twice as much between them
    assert 4 * 2 * 596_049_920 < found.peak_bytes < 6 * 2 * 596_049_920
    assert "tokens torch.Size([1, 304]) largest True" in found.output  # 300 words, two roles, two ends
    assert found.document["notes"] == [
        "Models have random weights: no checkpoint was read (--random-weights).",
        "Qwen/Qwen3-0.6B-Base: the configuration is the catalogue's, with bfloat16 weights; the tokenizer random, a"
        " token a word (--random-data).",
        "trl-lib/Capybara: 512 random examples a split: messages (chat, 300 words) (--random-data).",
    ]
    assert not os.path.exists(tmp_path / "empty")


def test_columns_of_an_unknown_dataset_are_said_and_what_is_here_is_read(tmp_path: Path) -> None:
    script = """
        import sys
        from datasets import load_dataset
        from huggingface_hub import snapshot_download
        from transformers import AutoTokenizer

        snapshot_download("somebody/something", repo_type="dataset", ignore_patterns=["*"])  # whether it is there
        assert load_dataset("json", data_files="own.jsonl", split="train")["text"] == ["mine"]
        found = load_dataset("somebody/something")["validation"]
        assert found[0]["image"].size == (64, 32) and 0 <= found[0]["label"] < 1000
        assert [one["from"] for one in found[0]["turns"]] == ["human", "gpt"]
        tokenizer = AutoTokenizer.from_pretrained("vision")
        assert tokenizer.convert_tokens_to_ids(tokenizer.image_token) == 151655
        AutoTokenizer.from_pretrained("somebody/something")
    """
    (tmp_path / "own.jsonl").write_text('{"text": "mine"}')
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "config.json").write_text(json.dumps(VISION))
    (tmp_path / "script.py").write_text(dedent(script))
    columns = "image=image:64x32,label=label,turns=sharegpt chat"
    found = rehearse(*ON, columns, "--", "script.py", folder=tmp_path, command=python_with_trl(), code=1)
    assert found.document["failure"]["message"].startswith(
        "--random-data: the configuration of 'somebody/something' is"
    )
    assert sorted(path.name for path in (tmp_path / "vision").iterdir()) == ["config.json"]


VISION = {
    "model_type": "qwen2_5_vl",
    "vocab_size": 152064,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {"patch_size": 14},
}
