"""Operations that are worth a kernel, one file each: the plain-torch reference comes first.

tables         table_formats.py, gather_rows.py, pool_rows.py, copy_rows.py, sparse_update.py,
               rounding.py
interaction    interaction.py, interaction_layout.py, gather_interaction.py, cross_layers.py
MLPs           relu_mlp.py, click_loss.py; in fp8: fp8_mlp.py, fp8_cross.py (of cross layers),
               fp8_codes.py, cublaslt.py
on a CPU       compiled.py, cpu_dropout.py, cpu_interaction.py, cpu_mlp.py, cpu_rows.py,
               cpu_scores.py, by numba
dense weights  adagrad_update.py
other models   adamw_update.py, fp8_linear.py, linear_cross_entropy.py, sentence_attention.py
click rows     terabyte_rows.py
launches       triton_here.py; graph.py; request_graphs.py: from a request to its answer
"""
