"""A config.json of a model that is not built in, where transformers is not installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdp_bench.spec.errors import SweepFileError
from fsdp_bench.sweep.config.sweep_file import read_file
from tests.sweep.config.test_grid import machine

T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "num_layers": 2}


@pytest.mark.skipif(find_spec("transformers") is not None, reason="transformers is installed")
def test_without_transformers_a_config_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "t5.json").write_text(json.dumps(T5))
    (tmp_path / "sweep.toml").write_text('[models.t5]\nhf_config = "t5.json"\n[grid]\nmodel = "t5"\n')
    with pytest.raises(SweepFileError, match=r"needs transformers: pip install .*(transformers|\[hf\])"):
        read_file(tmp_path / "sweep.toml", machine())
