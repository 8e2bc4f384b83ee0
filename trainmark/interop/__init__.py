"""Owns the files of other software.

shards.py         safetensors files of a few GB each, with Hugging Face's index
model_folder.py   Hugging Face's model folders
onnx_files.py     ONNX models
programs.py       programs of torch.export
"""
