"""NeMo Gym's names for commands of ours.

`ng_run` and `ng_collect_rollouts` come with Palestra. The scripts `gym`, `ng` and the other `ng_*` are installed by
`integrations/palestra_nemo_gym_cli` alone, so that a command called `gym` is never installed by accident.
"""

from palestra.cli.gym.ng.collecting import ng_collect_rollouts, ng_run

__all__ = ["ng_collect_rollouts", "ng_run"]
