"""Facts about GPUs, servers and models, each with its source and date, and their lookup by name.

Read in this order:
    gpus.toml        each GPU's usable memory, dense peak FLOP/s, rate of matrix products
    attention.toml   how fast attention kernels run; rates/attention_time.py reads it
    servers.toml     each server's GPUs, links between GPUs, network between nodes, host memory
    families.toml    each family of models: its class of transformers, and its own names of fields in a config.json
    models.toml      each published model's dimensions, with the names of Hugging Face's config.json
    prices.toml      what servers cost
    loader.py        the catalogue: the built-in files, and a user's file whose entries replace or add
    names.py         finds an entry by what people call it, and says which was meant where there is none
    lookup.py        gpu(), server() and model() by name, size or file; the GPUs that a run uses
    model_entry.py   one model of models.toml, its config.json, and whether predictions can express it exactly
    hf_config.py     reads a Hugging Face config.json
    recorded.py      reads a recorded model, and blocks as torch.compile compiled them (recordings/compiled/)
    architectures.py finds the recording that holds for a config.json, and for which of PEFT's adapters
    recordings/      recordings of what the models of models.toml run, for all sizes
    ladder.py        the size ladder: what "7B" means, a fixed list of models from 10M to 1T parameters
    user_file.py     reads and checks TOML files of this format, the built-in ones and a user's
"""
