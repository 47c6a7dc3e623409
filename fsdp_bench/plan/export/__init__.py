"""One setting as files that train it: accelerate, torchtitan, Hugging Face's Trainer, PyTorch alone, Slurm.

Read in this order:
    export.py       export_each(): the files of a setting; train.sbatch
    chosen.py       Chosen: the setting, its model, and what was predicted
    files.py        File: its header, its text by a template, how it starts; write(), which overwrites nothing
    templates/      the text of the files
    pieces.py       expressions of all scripts: literals, dtypes, adapters, loss, optimizer
    pytorch.py      train_fsdp.py
    plugin.py       what accelerate's FSDP plugin can express, and the Trainer's
    accelerate.py   accelerate.yaml and train_accelerate.py
    huggingface.py  train_huggingface.py
    torchtitan.py   torchtitan_config.py
"""
