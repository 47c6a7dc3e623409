"""The file format of a recorded model: what a model's code allocates, saves for backward, frees and computes.

Read in this order:
    recorded.py   RecordedCode: one model's code, its variants, what a training step of it does; the ends of a model
    steps.py      the instructions of a recorded step, and the names by which they refer to tensors
    formula.py    sizes as formulas of the batch, the sequence length and the fields of config.json
    config.py     what a config.json says of a recorded code, and which config.json files a recording holds for
    config_fields.toml  the fields of config.json by what they decide
    variants.py   which variant a setup runs
    own_loss.py   the loss that a recorded model computes itself, and the step without it
    model.py      RecordedModel: a recorded code with the sizes and the number of blocks of one model; its FLOPs
    compiled.py   CompiledCode: what compiled blocks allocate and free
"""
