"""One run: the training loop, its clocks, its folder, its result.

runner.py       from a configuration to a finished run; process.py: its place among the ranks
loop.py         THE training loop; feed.py prepares its batches ahead; unread.py keeps the scalars
                that steps leave on the device; profiler.py traces steps
checks.py       ends a run whose device does not compute the same bits twice
progress.py     how far a run is, its best evaluation, and why it ended
clocks.py       whole, train and core time; the sample counter
start.py        what a new run takes from another: weights, optimiser state
trials.py       settings that the data choose, by trying them
trained.py      the weights of a finished run, loaded to predict
memory.py       the memory that a run needs, and whether it is there
forecast.py     the predicted time, written down before the first step
run_folder.py   which run a folder belongs to, and its checkpoints; signals.py: requests to stop
runlog.py       progress and logs while it runs; eventlogs.py: log lines of published systems;
                mlperf.py: the log that MLPerf's checker reads
evaluation.py   `trainmark evaluate`; assessment.py: how good predictions are, and their scores
outcome.py      from a finished training to its result; result.py: result.json;
                energy.py: the energy that it used, and its price
warnings.py     why a result should not be trusted
curves.py       loss.csv and curves.csv; alignment.py: whether two losses agree
"""
