"""Owns tokenised text on disk, between a corpus and a workload. No torch.

tokens.py      `trainmark prepare tokens`: text -> Megatron's indexed files
tokenizer.py   its tokenizers
indexed.py     these files, byte for byte
samples.py     samples of a fixed length from them, in Megatron's order
dataset.py     a folder of them: splits, vocabulary
sst2.py        `trainmark prepare sst2`: a table of sentences -> tokenised sentences
sentences.py   tokenised, labelled sentences on disk
sentence_files.py   sentences of any files, a part at a time
"""
