"""The vocabulary of all packages: frozen types, validation, units, file formats.

Imports no torch, nothing else of fsdp_bench.

Read in this order:
    setup.py        TrainSetup: strategy, precision, offload, checkpointing, batch; each field says all about itself
    field.py        Field: option, help, column and age of a setting, from which options, columns and IDs are derived
    vocabulary.py   the words of a setup: strategies, wrappers, optimizers, losses, precisions
    impossible.py   which setups cannot run
    checkpointing_policy.py  which outputs and which blocks activation checkpointing saves
    model.py        ModelShape: dimensions, number of parameters, FLOPs
    lora.py         LoRA: adapters, and how the frozen weights are stored
    model_code.py   ModelCode: a trial's model that Hugging Face's code or a user's function builds
    hardware.py     Gpu, Server, Hardware and their links
    price.py        Price: what an hour of a server costs
    record.py       TrialRecord: one trial's JSON file; RunPlan: steps, time limit and their defaults
    rank_report.py  RankReport: what one rank of a trial measured; Outcome: ok, oom_gpu, timeout, ...
    frontier.py     FrontierRecord: the measured largest model of each cell, frontier.json
    calibration_profile.py  Profile: the calibration of a machine
    pointwise.py    the kernel that PyTorch launches for a pointwise operator
    recording/      the file format of a recorded model: its code as instructions, with sizes as formulas
    subprocesses/   input and output of dry runs and rehearsals
    units.py        parsing and printing of sizes, counts and times
    errors.py       the tree of errors, the exit codes; text from outside made safe to print
    checked.py      Checked: structs that check their fields by type hints
    codec.py        JSON in and out
    files.py        reading TOML and JSON files, writing files whole or not at all; the folder of what can be made again
"""
