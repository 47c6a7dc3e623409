"""One setting as files that train it: accelerate, torchtitan, Hugging Face's Trainer, PyTorch alone, Slurm.

Read in this order:
    export.py       export(): the files of a setting
    chosen.py       Chosen: the setting, its model, and what was predicted
    files.py        File; write(), which overwrites nothing
    header.py       the comment at the beginning of every file
    launch.py       the commands that start files
    pieces.py       Python of all scripts: config, tokens, loss, optimizer
    blocks.py       Python that checkpoints, offloads and compiles blocks
    adapters.py     Python that puts PEFT's adapters into a model
    sharding.py     Python that builds and shards a model
    pytorch.py      train_fsdp.py
    plugin.py       what accelerate's FSDP plugin can express, and the Trainer's
    accelerate.py   accelerate.yaml and train_accelerate.py
    huggingface.py  train_huggingface.py
    torchtitan.py   torchtitan_config.py
    slurm.py        train.sbatch
"""
