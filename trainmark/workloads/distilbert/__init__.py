"""DistilBERT: a sentence classifier, fine-tuned from a Hugging Face encoder or from scratch.

Besides the files that every workload has (docs/adding_a_workload.md):

    layouts.py     Hugging Face's names and config.json; weights.py reads and writes such folders
    predictions.py classes and probabilities for the sentences of files
    plan.py        how long a step should take, and its memory
    opinions.py    the made-up language of `--data synthetic`
"""
