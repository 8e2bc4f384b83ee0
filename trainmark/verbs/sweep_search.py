"""The search of a sweep, by Optuna: which values to try next, and which runs to end early.

Only the trials so far and the run's seed decide: a search that was killed and started again goes on
as it would have. So each trial makes a new study from all trials before it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from trainmark.errors import require
from trainmark.run.result import Evaluation
from trainmark.verbs.attempt import DONE, PRUNED, Pruned
from trainmark.verbs.sweep_space import Field, Values
from trainmark.verbs.sweep_trials import Trial, values_of

if TYPE_CHECKING:
    import optuna

FIRST_TRIALS = 4  # at random; and none is ended early before as many have ended


class Search:
    """Values for trials, one after another.

    Args:
        fields: what to vary.
        better: `higher` or `lower` values of the metric.
        seed: another one tries others.
    """

    def __init__(self, fields: Sequence[Field], better: str, seed: int) -> None:
        require("--trials", "optuna", extra="search")
        self._fields = list(fields)
        self._direction: Literal["maximize", "minimize"] = (
            "maximize" if better == "higher" else "minimize"
        )
        self._seed = seed

    def ask(self, trials: Sequence[Trial]) -> Values:
        """What to try after these."""
        params = self._study(trials).ask(self._distributions()).params
        return {
            field.name: params[field.name] if field.choices else field.text(params[field.name])
            for field in self._fields
        }

    def watcher(
        self, trials: Sequence[Trial], trial: Trial, metric: str
    ) -> Callable[[Sequence[Evaluation]], None]:
        """What ends `trial`, by `Pruned`, where it does worse than half of those before it."""
        study = self._study(trials)
        study.enqueue_trial(self._params(trial.values))
        asked = study.ask(self._distributions())
        reported: list[float] = []

        def watch(evaluations: Sequence[Evaluation]) -> None:
            found = values_of(evaluations, metric)
            for number in range(len(reported), len(found)):
                asked.report(found[number], number)
            reported[:] = found
            if asked.should_prune():
                raise Pruned(found)

        return watch

    def _study(self, trials: Sequence[Trial]) -> "optuna.Study":
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            direction=self._direction,
            sampler=optuna.samplers.TPESampler(
                n_startup_trials=FIRST_TRIALS, seed=self._seed + len(trials)
            ),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS),
        )
        study.add_trials([self._frozen(trial) for trial in trials])
        return study

    def _frozen(self, trial: Trial) -> Any:
        import optuna

        states = optuna.trial.TrialState
        state = {DONE: states.COMPLETE, PRUNED: states.PRUNED}.get(trial.outcome or "", states.FAIL)
        if state == states.COMPLETE and trial.value is None:  # the metric was undefined
            state = states.FAIL
        return optuna.trial.create_trial(
            state=state,
            value=trial.value if state == states.COMPLETE else None,
            params=self._params(trial.values),
            distributions=self._distributions(),
            intermediate_values=dict(enumerate(trial.evaluations)),
        )

    def _params(self, values: Values) -> dict[str, Any]:
        def number(field: Field, text: str) -> str | int | float:
            if field.choices:
                return text
            return int(text) if field.whole else float(text)

        return {field.name: number(field, values[field.name]) for field in self._fields}

    def _distributions(self) -> dict[str, Any]:
        import optuna.distributions as of

        def distribution(field: Field) -> Any:
            if field.choices:
                return of.CategoricalDistribution(field.choices)
            if field.whole:
                return of.IntDistribution(int(field.low), int(field.high), log=field.log)
            return of.FloatDistribution(field.low, field.high, log=field.log)

        return {field.name: distribution(field) for field in self._fields}
