"""What the verbs do around a run; the command line only names them.

flags.py            from words to a run and its options; flag_errors.py: wrong words as a sentence;
                    aliases.py: what other systems call our flags
runs.py             list, show, train, infer
evaluate.py         how good a run's predictions are
plan.py             memory and predicted time before a run
export.py           a checkpoint in the layout of other software
verify.py           whether every byte is as it was written
suite.py            a list of cases; suite_cases.py reads and checks it
sweep.py            one run per value of a field
attempt.py          one run in a process of its own; attempt_tables.py: the tables of many
"""
