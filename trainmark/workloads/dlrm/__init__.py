"""DLRM: a click-through recommender with large embedding tables, trained from click logs.

Besides the files that every workload has (docs/adding_a_workload.md):

Settings
    network.py             the network's settings, and the sizes that follow from them
    sizes.py               devices, formats and bytes of tables
    checks.py              what is wrong with the settings
    auto.py                what dlrm-auto chooses for a log; cross_choice.py: its crosses
    fitted.py              which settings follow from the data, and which may differ

Data
    rows.py                where click rows come from: a dataset on disk, or made in memory
    terabyte.py            rows of the planted Terabyte, made on the device
    multi_hot.py           several ids per feature made from one, as MLPerf does
    crosses.py             ids of combinations of features

Network and training
    mlp.py                 a multi-layer perceptron
    interactions.py        what combines the vectors for the top MLP
    sharding.py            which device holds which part of which table
    slots.py               places on a GPU where CUDA graphs find their batches
    warnings.py            why a trained model should not be trusted

Planning
    plan.py                what `trainmark plan` prints
    step_time.py           the predicted time of a step; gpu_time.py: its kernels on one GPU

A trained model
    importance.py          what each column is worth
    one_pass.py            predictions in one pass on a CPU, without torch; fast_prediction.py: a
                           trainer's; graphed_prediction.py: as CUDA graphs
    raw_files.py           files for `evaluate --input` and `predict`, encoded and scored
    requests.py            rows of requests to `serve`; request_values.py: what their values are;
                           prepared_values.py: of rows that hold ids
    description.py         what an exported model says of itself
    standalone.py          the exported model in plain PyTorch; onnx_graph.py: as an ONNX graph
"""
