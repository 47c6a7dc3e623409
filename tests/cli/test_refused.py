"""What every command refuses: in one line, with exit code 2, before anything runs or is predicted."""

import gzip
import json
import shlex
from pathlib import Path

import pytest

from tests.conftest import refused
from tests.shapes import llama_config

ROOT = Path(__file__).parents[2]
P5 = "--server p5.48xlarge"
GPT2 = f"predict --model gpt2 {P5}"
SIZES = "max-size --server g5.48xlarge"
LLAMA = "predict --model Llama-3.1-8B"
LORA = "predict --hf-config config.json --lora"
REHEARSE, PYTHON = "rehearse --gpu H100-SXM", "-- python -c pass"
SWEEP = f"sweep {ROOT}/sweeps/"
RESULTS = f"{ROOT}/results/xeon-2-cores"
ESCAPES, ESCAPED = "\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"

THE_COMMAND = [
    ("swep", "did you mean 'sweep'"),
    ("predict --modle gpt2", "No such option '--modle' (did you mean '--model'?)"),
    ("report no-such-folder", "no results here"),
    ("chart no-such-folder", "no results here"),
    (f"report {RESULTS}/cpu --communication --calibration {RESULTS}/calibration.toml", "is about matrix products"),
    (f"validate --against {RESULTS} --page x.html", "a file that ends in .md"),
    (
        "validate --against published",
        "'published' is no folder of results; in the clone of fsdp-bench, python -m tools",
    ),
    ("validate --against dry-run --page p.md", "python -m tools.validate --against dry-run compares"),
    ("servers h100-smx", "'h100-smx' is neither a server nor a GPU of the catalogue (did you mean 'H100-SXM'?)"),
    ("servers A30", "'A30' is neither a server nor a GPU of the catalogue; `fsdp-bench servers` lists what"),
    ("models lama-3.1-8b", "did you mean 'Llama-3.1-8B'"),
    ("models --catalog none.toml", "none.toml: cannot be read: No such file or directory"),
]
A_MODEL = [
    ("predict", "no model is named; --model NAME, --hf-config FILE, --recorded FILE or --params 7B"),
    ("predict --params 7B --model gpt2", "--model and --params each name a model; keep one"),
    ("predict --recorded x.json --params 7B", "--recorded and --params each name a model; keep one"),
    ("predict --recorded nowhere/x.json", "x.json: cannot be read"),
    ("predict --model gpt2 --code mine", "huggingface, torchtitan, benchmark"),
    (
        "predict --model qwen3-8b --code benchmark",
        "Qwen3-8B can be listed, not predicted or trained: Qwen 3 normalises",
    ),
    ("predict --model gpt2 --family gpt2", "family: goes with --params; --model has its own"),
    ("predict --model gpt2 --seq 2048", "seq: 2048 is not allowed; gpt2 has 1024 learned positions"),
    ("predict --params 7", "params: 7 is not on the size ladder"),
    (f"predict --params 1{'0' * 400}", "params: '1000"),
    (f"predict --params {'9' * 400}B", "is too large"),
    (f"predict --params {'x' * 5100}", "(5102 characters)"),
    (f"predict --params '{ESCAPES}'", ESCAPED),
    (f"predict --params 10M '--{ESCAPES}\n'", "\\x1b]0;title\\x07"),
    ("predict --params 7B --family bert", "family: 'bert' is not allowed; one of llama, gpt2"),
    (f"{LORA} rank=0", "lora: rank: 0 is not allowed; 1 or more"),
    (f"{LORA} 16 --qlora 8", "lora and qlora: keep one"),
    (f"{LORA} 16 --code benchmark", "lora: adapters go into Hugging Face's code"),
    ("predict --hf-config config.json --qlora 16,base=bf16", "qlora: its base is nf4"),
    ("predict --params 7B --lora 16", "lora: adapters go into Hugging Face's code"),
    ("predict --recorded x.json --qlora 16", "qlora: adapters go into Hugging Face's code"),
    ("predict --params 7B --wrap block-and-adapters", "the model has no frozen parameters"),
    (f"{LLAMA} --lora 16 --gpu H100-SXM --api fsdp1 --wrap block", "with uniform dtype"),
    (f"{LLAMA} --attention flex_attention", "'flex_attention' is not predicted; one of sdpa, eager, flash_attention_2"),
    ("predict --params 7B --attention eager", "attention: goes with Hugging Face's code"),
    (f"{LLAMA} --code benchmark --attention eager", "attention: goes with Hugging Face's code"),
    ("dry-run --params 7B --lora 16", "lora: adapters go into Hugging Face's code"),
    ("dry-run --module a:b --lora 16", "--module and --lora each name a model"),
    ("record --module a:b --lora 16", "lora: goes with --hf-config"),
    ("record --hf-config config.json --lora 16 --qlora 16", "keep one"),
    ("record", "--hf-config FILE or with --module"),
    ("record --hf-config a.json --module a:b", "name the code"),
    ("record --module tests.simulate.recorded.users:llama -o nowhere/x.json", "no folder"),
    ("record --module unsized:whole -o y.json", "needs the parameters micro_batch_size and"),
]
FILES = {
    "config.json": json.dumps(llama_config()).encode(),
    "x.json": b"{}",
    "unsized.py": b"def whole(): ...",
    "mine.py": b"raise SystemExit('imported')\ndef build(): ...\nclass Block: ...\n",
    "train_fsdp.py": b"mine",
    "half.json": b'{"model_type": "qwen2", "hidden_si',
    "no-type.json": b'{"hidden_size": 64}',
    "list.json": b"[]",
    "empty.json": b"",
    "newer.json": b'{"format_version": 999}',
    "bare.json": b'{"format_version": 2}',
    "name.json": b'{"name": "x"}',
    "cut.json.gz": gzip.compress(b"{}", mtime=0)[:12],
}
"""What is in the folder that the commands run in: nothing there is changed, and no code of the user runs."""
RECORDED = "predict --gpu H100-SXM --recorded"
MODULE = "dry-run --module"
A_FILE = [
    ("record --hf-config half.json", "half.json"),
    ("record --hf-config no-type.json", "it has no model_type"),
    ("record --hf-config list.json", "is not a Hugging Face config.json"),
    (f"{RECORDED} empty.json", "is not a recorded model"),
    (f"{RECORDED} newer.json", "is a recorded model of version 999, and this fsdp-bench reads 2; record it again"),
    (f"{RECORDED} bare.json", "is not a recorded model: "),
    (f"{RECORDED} half.json", "is not a recorded model"),
    (f"{RECORDED} cut.json.gz", "cannot be read"),
    (f"{RECORDED} name.json", "`fsdp-bench record` writes one"),
    (f"{MODULE} mine:build", "which class are its blocks? --transformer-block"),
    (f"{MODULE} mine:build --wrap none --loss chunked", "computes its own loss"),
    (f"{MODULE} mine:build --params 7B", "each name a model"),
    ("dry-run --params 10M --transformer-block mine:Block", "requires --module"),
    ("dry-run --params 10M --gpu H100-SXM --headroom 90GiB", "headroom: 90.0 GiB is not allowed"),
    ("dry-run --params 10M --strategy all --world-size 4 --trace t", "--trace accepts one setup"),
]
EXPORT = f"{LLAMA} {P5} --export"
AN_EXPORT = [
    (f"{EXPORT} vllm", "one of pytorch"),
    (f"{LLAMA} {P5} --export-dir x", "goes with --export"),
    (f"{EXPORT} pytorch --export-dir x.json", "no folder"),
    (f"{EXPORT} pytorch --strategy all", "of one setup"),
    (f"{EXPORT} pytorch --batch 1,2 --csv -", "of one setup"),
    (f"{EXPORT} pytorch --csv -", "name a file"),
]
A_PLACE = [
    (
        "predict --model gpt2 --gpu A100",
        "could be A100-SXM-40GB, A100-SXM-80GB, A100-PCIe-40GB or A100-PCIe-80GB; name",
    ),
    ("predict --params 7B --server p5 --gpu b200", "server and gpu each name the GPU; keep one"),
    ("predict --params 7B --server p5.48xl", "did you mean 'p5.48xlarge'"),
    ("predict --params 7B --gpu H100-40GB", "of that kind there are H100-SXM, H100-PCIe, H100-NVL, H100-SXM-96GB"),
    ("predict --params 7B --gpu A100-SXM-81GB", "did you mean 'A100-SXM-80GB'"),
    ("predict --params 7B --world-size 8 --nodes 2", "world_size and nodes each say how many GPUs; keep one"),
    (f"predict --params 7B {P5} --world-size 12", "world_size: 12 is not allowed; a multiple of the 8 GPUs"),
    (f"predict --params 7B {P5} --gpus-per-node 9", "gpus-per-node: 9 is not allowed; p5.48xlarge has 8"),
    (f"predict --params 10M --gpu RTX-4090 --gpu-memory {'9' * 400}GiB", "is too large"),
    (
        "max-size --gpu A10 --world-size 8",
        "nobody documents how much memory a process can use on A10; say it with --gpu-m",
    ),
    ("predict --params 7B --server nosuchthing", "is not in the catalogue; `fsdp-bench servers` lists what is there"),
]
A_SETUP = [
    ("predict --params 7B --strategy nope", "strategy: 'nope' is not allowed; one of FULL_SHARD,"),
    ("predict --params 7B --strategy nope", "zero3, zero2, shard-grad, ddp, hsdp, hybrid-shard-zero2, 1, 2, 3, 4, 5"),
    ("predict --params 7B --strategy zero-3", "(did you mean 'zero3'?)"),
    ("predict --params 7B --min-num-params 1M", "min-num-params: only --wrap size has one"),
    ("predict --params 7B --wrap block --min-num-params 1M", "min-num-params: only --wrap size has one"),
    ("predict --params 7B --precision fp12", "precision: 'fp12' is not allowed"),
    ("predict --params 7B --shard-size 2", "shard-size: only HYBRID_SHARD and _HYBRID_SHARD_ZERO2 have one"),
    ("predict --params 7B --max-grad-norm -1", "max_grad_norm: -1.0 is not allowed"),
    ("predict --params 7B --max-grad-norm nan", "max_grad_norm: nan is not allowed"),
    ("predict --params 7B --strategy hsdp", "HYBRID_SHARD needs at least 2 groups of at least 2 ranks"),
    (
        "predict --params 1B --world-size 8 --api fsdp2 --reshard-after-forward 3",
        "reshard_after_forward: 3 is not allowed with world_size 8; one of 2, 4",
    ),
    ("predict --params 7B --api fsdp2 --no-limit-all-gathers", "fsdp2 has no rate limiter to turn off"),
    ("predict --params 7B --api fsdp2 --strategy ddp --offload params", "has no CPU offload; api fsdp1 has"),
    (f"{GPT2} --kernels tpu", "'tpu' is not one of"),
    (f"{GPT2} --load rank-9", "'rank-9' is not one of"),
    (f"{GPT2} --cuda cu121", "no version of CUDA"),
    (f"{GPT2} --power 500", "power: '500' has no unit of power; W or kW"),
    (f"{GPT2} --power 800W", "power: 800 W is not allowed; 200 to 700 W on H100-SXM"),
    ("predict --model gpt2 --power 500W", "power: no GPU is named; --server NAME or --gpu NAME"),
    ("max-size --gpu B200 --power 700W", "how slow B200 is below its default of 1000 W is not known"),
    (f"plan --model gpt2 {P5} --power 100W", "power: 100 W is not allowed; 200 to 700 W on H100-SXM"),
    (f"{REHEARSE} --power 5W {PYTHON}", "power: 5 W is not allowed; 200 to 700 W on H100-SXM"),
    (f"{GPT2} --strategy all --api all --chart step.png", "are too many for one picture; at most 6"),
    (f"{GPT2} --chart step.jpg", "a file that ends in .png or .svg"),
    (f"{GPT2} --chart no-such-folder/step.png", "'no-such-folder' is no folder"),
    ("predict --strategy FULL_SHARD --strategy NO_SHARD", "--strategy is given 2 times; give it once; several"),
    ("predict --seq 16 --seq 32", "--seq is given 2 times; give it once"),
    ("predict --params 10M --no-sync --sync-every-micro-batch", "is given on and off"),
]
NUMBERS = ",".join(map(str, range(1, 102)))
LISTS = [
    (
        f"{GPT2} --batch {NUMBERS} --accumulate {NUMBERS}",
        "10,201 setups are too many; up to 10,000: a shorter list of --b",
    ),
    (f"{GPT2} --batch 1,two", "batch: 'two' is not allowed; a whole number, 1 or more"),
    (f"{GPT2} --compile on,maybe", "compile: 'maybe' is not allowed; on, off, or on,off for both"),
    ("predict --model gpt2 --server p5.48xlarge,p5.48xlrge", "did you mean 'p5.48xlarge'"),
    (f"{GPT2} --sort step", "are of a table of several setups; one was given"),
    (f"{GPT2} --batch 1,2 --sort stepp", "sort: 'stepp' is no column (did you mean 'step'?)"),
    (f"{GPT2} --batch 1,2 --columns step,stepp", "columns: 'stepp' is no column"),
    (f"{GPT2} --batch 1,2 --csv no-such-folder/a.csv", "csv: 'no-such-folder' is no folder"),
    (f"{GPT2} --nodes 1,2 --chart a.png", "chart: the setups differ in nodes; a picture is of one"),
]
THE_LARGEST = [
    ("max-size --server p5.48xlrge", "did you mean 'p5.48xlarge'?"),
    ("max-size", "no GPU is named; --server NAME or --gpu NAME"),
    (f"{SIZES} --gpu A10G", "keep one"),
    (f"{SIZES} --model gpt2", "--of num_hidden_layers, micro_batch_size, sequence_length, gpus"),
    (f"{SIZES} --of gpus --model gpt2 --nodes 2", "--nodes is what --of gpus looks for"),
    (f"{SIZES} --of micro_batch_size", "no model is named"),
    (f"{SIZES} --of depth", "'depth' is not one of"),
    (f"{SIZES} --gpu-memory 80GiB", "A10G has 24 GiB"),
    (f"{SIZES} --gpu-memory much", "is not a size"),
    (f"{SIZES} --strategy zero9", "zero9"),
    (f"{SIZES} --chart size.pdf", "ends in .png or .svg"),
    (f"{SIZES} --gpus-per-node 2 --strategy hsdp", "needs at least 2 groups"),
    (f"{SIZES} --precision all --offload all --chart x.png", "too many for one picture"),
    (f"{SIZES} --recorded mine.json.gz", "--recorded names one model; say what to look for: --of num_hidden_layers"),
    (f"{SIZES} --lora 16", "--lora: adapters go into one model"),
    (f"{SIZES} --of micro_batch_size --hf-config config.json --lora ra=0", "has no field 'ra'"),
]
BOTH = [
    ("compare", "compare: name two, A and B"),
    (f"compare '--batch 2' --model gpt2 {P5}", "compare: after A and B come options of both, not 'gpt2'"),
    (f"compare '--batch 1,2' '' --model gpt2 {P5}", "batch: '1,2' is several values; one is allowed here"),
    (f"compare '--strategy all' '' --model gpt2 {P5}", "strategy: 'all' is several values; one is allowed here"),
    (f"compare '--modle x' '' --model gpt2 {P5}", "No such option '--modle'"),
    (f"compare nothing.json '' --model gpt2 {P5}", "nothing.json: cannot be read: No such file"),
    (f"compare a.json b.json --model gpt2 {P5}", "A and B are files; leave it out"),
    (f"compare '--batch \"2' '' --model gpt2 {P5}", "cannot be read as options"),
    ("compare '--strategy hsdp' '' --model gpt2", "A: HYBRID_SHARD needs at least 2 groups"),
]
A_SCRIPT = [
    (REHEARSE, "command: nothing to run"),
    (f"{REHEARSE} -- python no_such_file.py", "no_such_file.py"),
    (f"rehearse {PYTHON}", "no GPU is named; --server NAME or --gpu NAME"),
    (f"rehearse --gpu H1000 {PYTHON}", "H1000"),
    (f"{REHEARSE} --steps none {PYTHON}", "steps: 'none' is not allowed; a whole number"),
    (f"{REHEARSE} --steps 0 {PYTHON}", "steps: '0' is not allowed"),
    (f"{REHEARSE} --rank 1 --ranks 0,1 {PYTHON}", "keep one"),
    (f"{REHEARSE} --world-size 8 --ranks 0,8 {PYTHON}", "0 to 7, by the world size"),
    (f"{REHEARSE} --ranks all {PYTHON}", "all needs --world-size or --server"),
    (f"{REHEARSE} --gpu-memory 900GiB {PYTHON}", "gpu-memory"),
    (f"{REHEARSE} --chart memory.pdf {PYTHON}", "ends in .png or .svg"),
    (f"{REHEARSE} --snapshot no/such/folder/s.pickle {PYTHON}", "is no folder"),
    (f"{REHEARSE} --time --steps 1 {PYTHON}", "steps: '1' is not allowed with --time"),
    (f"{REHEARSE} --random-data image=film {PYTHON}", "random-data: 'image=film' is not allowed; the words of a text"),
    (f"{REHEARSE} --tokens-per-step 8 {PYTHON}", "tokens-per-step: it counts for --time alone"),
    (f"{REHEARSE} --time --tokens-per-step 0 {PYTHON}", "tokens-per-step: '0' is not allowed"),
    (f"rehearse --gpu MI300X {PYTHON}", "cannot be rehearsed"),
]
A_SWEEP = [
    ("sweep", "Missing argument 'FILE'"),
    ("sweep no-such.toml", "no such file"),
    ("sweep .", "cannot be read: Is a directory"),
    (f"{SWEEP}quick.toml --only stratgy=x --list", "did you mean 'strategy'"),
    (f"{SWEEP}quick.toml --only strategy=NOPE --list", "'NOPE' is not allowed"),
    (f"{SWEEP}quick.toml --only api=fsdp1 --only api=fsdp2 --list", "no trial"),
    (f"{SWEEP}quick.toml --retry ok", "'ok' is not one of"),
    (f"{SWEEP}quick.toml --emulate-world 8k", "'8k' is not allowed; a whole number, 1 to 4096"),
    # A mistake is told before the machine, which has no GPU, is looked at.
    (f"{SWEEP}gpu.toml --only stratgy=x", "did you mean 'strategy'"),
    (f"{SWEEP}gpu.toml --only xyz", "neither the beginning of an ID nor FIELD=VALUE"),
    (f"{SWEEP}h200.toml --only world_size=3", "no trial of this sweep matches"),
    (f"{SWEEP}gpu.toml --part 1/0", "'1/0' is not allowed; K/N with 1 <= K <= N <= the number of trials"),
    (f"{SWEEP}throughput.toml --part 1/9", "'1/9' is not allowed; K/N with 1 <= K <= N <= 8, the number of trials"),
    (f"{SWEEP}throughput.toml", "'cuda' was asked for and this machine shows no GPU"),
    (f"{SWEEP}a10g-emulated.toml", "'cuda' was asked for and this machine shows no GPU"),
    (f"{SWEEP}gpu.toml --list", 'world_size = "gpus"; and this machine shows no GPU'),
    (f"{SWEEP}max-size-gpu.toml --list", 'world_size = "gpus"; and this machine shows no GPU'),
]


@pytest.mark.parametrize(
    ("words", "part"),
    [*THE_COMMAND, *A_MODEL, *A_FILE, *AN_EXPORT, *A_PLACE, *A_SETUP, *LISTS, *THE_LARGEST, *BOTH, *A_SCRIPT, *A_SWEEP],
    ids=lambda text: text.replace(str(ROOT), ""),
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(
    words: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    assert part in refused(*shlex.split(words), cwd=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == FILES
