"""DLRM: a click-through recommender with large embedding tables, trained from click logs.

Besides the files that every workload has (docs/adding_a_workload.md):

    auto.py               what dlrm-auto chooses, by a log's rows
    fitted.py             which settings follow from a log, and which may differ
    rows.py               where click rows come from: a dataset on disk, or made in memory
    crosses.py            tables of combinations of features; cross_choice.py: which a log has
    multi_hot.py          several ids per feature from one, as MLPerf makes them
    terabyte.py           rows of the planted Terabyte, made on the device
    sizes.py              layers, parameters, widths and bytes; checks.py: what is wrong with them
    mlp.py                a multi-layer perceptron; interactions.py: what goes before the top one
    sharding.py           which device holds which part of which table
    step_time.py          how long a step should take; gpu_time.py: its kernels on one GPU;
                          plan.py: what `trainmark plan` tells of it
    slots.py              places on a GPU where CUDA graphs find their batches; mlperf.py: its rules
    one_pass.py           predictions in one pass on a CPU, without torch; fast_prediction.py: a
                          trainer's; graphed_prediction.py: as CUDA graphs
    description.py        what an export says of itself; standalone.py: the exported model in plain
                          PyTorch; onnx_graph.py: as an ONNX graph; exported_clicks.py: its answers
    importance.py         what each column is worth to a trained model
    warnings.py           what makes a trained model one not to trust
    raw_files.py          files for `trainmark evaluate --input` and `predict`, encoded;
                          exported_files.py: scored without a trainer
    requests.py           rows of requests to `trainmark serve`, and their scores;
                          prepared_values.py: those that hold ids, not raw values
"""
