"""One run: the training loop, its clocks, its folder, its result.

runner.py       from a configuration to a finished run, or to a loaded model
loop.py         THE training loop; feed.py prepares its batches ahead; unread.py keeps what steps
                leave on the device; profiler.py traces steps
checks.py       what ends a run whose device does not give the same bits twice
progress.py     how far a run is, its best evaluation, and why it ended
clocks.py       whole, train and core time; the sample counter
start.py        what a new run takes from another: weights, optimiser state
trials.py       settings that the data choose, by trying them
memory.py       what a run needs of a device, and whether it is there
forecast.py     what it should take, written down before the first step
run_folder.py   whose a folder is, and where its checkpoints lie; signals.py: asked to stop
runlog.py       progress and logs while it runs; eventlogs.py: log lines of published systems;
                mlperf.py: a run as MLPerf's checker wants it told
evaluation.py   `trainmark evaluate`; assessment.py: how good predictions are, and their scores
outcome.py      from a finished training to its result; result.py: result.json;
                energy.py: what it used, and its price
warnings.py     what makes a result one not to trust
curves.py       loss.csv and curves.csv; alignment.py: whether two losses agree
"""
