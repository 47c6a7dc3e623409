"""Records Hugging Face's and torchtitan's code for all sizes of an architecture, with torch.

Read in this order:
    main.py      ``python -m tools.all_sizes.main CODE PARENT``: one recording
    subjects.py  the code to record, in small models
    points.py    the sizes of the small models
"""
