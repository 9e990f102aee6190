"""What options are named in other libraries: Lightning, Accelerate, Transformers, timm, Stable-Baselines3 and Hydra."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache

from runner.config.options import root_keys

NAMES = {
    "optimizer.lr=…": "lr learning_rate base_lr init_lr initial_lr max_lr lr0",
    "optimizer=…": "opt optim optimizer_name",
    "optimizer.weight_decay=…": "weight_decay wd l2",
    "optimizer.momentum=…": "momentum",
    "schedule=…": "sched scheduler lr_scheduler lr_scheduler_type lr_schedule lr_policy",
    "schedule.warmup=…, in steps": "warmup_steps num_warmup_steps",
    "schedule.warmup=…, a fraction of the run": "warmup warmup_epochs warmup_ratio",
    "max_grad_norm=…": "gradient_clip_val clip_grad clip_grad_norm grad_clip grad_norm gradient_clipping max_norm",
    "ema.decay=…": "model_ema model_ema_decay ema_decay use_ema",
    "workload.label_smoothing=…": "smoothing label_smoothing label_smoothing_factor",
    "epochs=…": "max_epochs num_epochs num_train_epochs n_epochs total_epochs max_epoch epoch",
    "steps=…": "max_steps num_steps num_training_steps train_steps total_steps max_iters iterations num_iterations",
    "batch_size=…, of all processes": "per_device_train_batch_size train_batch_size bs batch global_batch_size",
    "accumulation.steps=…": "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps accum_steps",
    "parallel=ddp parallel.processes=…": "devices gpus num_gpus num_devices nproc_per_node num_processes world_size",
    "torchrun --nnodes=… -m runner parallel=ddp, on each machine": "num_nodes nodes nnodes num_machines machine_rank",
    "device=cuda, device=mps or device=cpu": "accelerator use_cuda cuda use_gpu",
    "device=cpu": "cpu no_cuda use_cpu",
    "device.index=…": "gpu gpu_id gpu_ids device_id local_rank",
    "parallel=ddp, parallel=fsdp or another mode": "strategy distributed_type distributed backend",
    "parallel=ddp": "ddp multi_gpu data_parallel",
    "parallel=fsdp": "fsdp deepspeed zero_stage",
    "precision=bf16": "bf16 bfloat16 amp_dtype",
    "precision=16 or precision=bf16": "fp16 half amp use_amp mixed_precision float16 autocast",
    "compile=true": "torch_compile torchcompile compile_model",
    "model.checkpoint_activations=true": "gradient_checkpointing grad_checkpointing activation_checkpointing",
    "seed=…": "seed_everything random_seed manual_seed",
    "data.workers=…": "num_workers workers dataloader_num_workers",
    "data=…": "dataset dataset_name datamodule",
    "data.root=…": "data_dir data_path dataset_path train_dir root",
    "data.size=…": "img_size image_size input_size resolution imgsz",
    "model=…; any network of timm: model=timm model.name=…": "arch network net backbone model_name",
    "model.weights=FILE": "pretrained pretrained_path initial_checkpoint weights_path",
    "resume=RUN": "ckpt_path resume_from_checkpoint resume_from ckpt checkpoint load_checkpoint checkpoint_path",
    "output_root=…": "output_dir default_root_dir log_dir logdir save_dir work_dir output",
    "name=…": "run_name exp_name experiment_name task_name project_name hydra.job.name",
    "tracking=…": "logger loggers report_to wandb log_with use_wandb tensorboard_log tracker",
    "log_every=…": "log_interval log_every_n_steps logging_steps print_freq",
    "eval_every=…, in steps": "val_check_interval check_val_every_n_epoch eval_steps eval_interval eval_freq",
    "save_every=…, in steps": "save_steps save_interval checkpoint_interval save_freq",
    "stop.patience=…": "patience early_stopping early_stopping_patience",
    "debug=smoke": "fast_dev_run dry_run",
    "env.id=…": "env_id env_name",
    "workload.env_steps=…": "total_timesteps n_timesteps timesteps env_steps",
    "workload.replay_size=…": "buffer_size replay_buffer_size memory_size",
    "workload.warm_up=…": "learning_starts start_steps",
    "workload.discount=…": "gamma",
    "sweep.search=tpe": "hydra/sweeper sweeper",
    "sweep.trials=…": "hydra.sweeper.n_trials n_trials num_trials",
    "sweep.slots=…": "hydra.launcher.n_jobs hydra.sweeper.n_jobs n_jobs",
    "sweep=local, sweep=slurm or sweep=ray": "hydra/launcher launcher",
    "--run-directory=DIR": "hydra.run.dir run_dir",
    "-m": "multirun hydra.mode",
}
"""For each text to type: the names that mean the same elsewhere. A dotted key is also known by its last word."""

PARTS = {
    "model": "net network backbone arch module",
    "data": "dataset datasets dataloader dataloaders loader train_loader train_dataset train_data trainset datamodule",
    "collate": "collate_fn collator data_collator",
    "loss": "criterion loss_fn loss_func loss_function compute_loss objective",
    "metrics": "metric eval_metrics compute_metrics",
    "schedule": "lr_lambda",
    "training_step": "train_step",
    "evaluation_step": "validation_step eval_step test_step",
}
"""For each part of a user's code: what it is named elsewhere."""
_WITHOUT = {
    "optimizer optimizers": "type optimizer=adamw, for example; of a class of yours, optimizer=torch optimizer.name=…",
    "sampler batch_sampler train_sampler": "the order follows from seed: repeat samples of the data, or leave some out",
    "callback callbacks": "hooks are after_step(state), after_evaluation(state, metrics) and before_save(state)",
    "configure_optimizers": "type optimizer=…, schedule=… and what --help lists of them",
}
"""For names of what is no part of a user's code: what to do instead."""


def of_code(name: str, missing: Iterable[str], is_callable: bool = True) -> str:
    """Return what to write or type instead of code that is given by a `name`; empty if nothing is known of the name.

    `missing` are the parts that are not given: the name of one that is given is not misspelt.
    """
    plain, missing = name.lower(), list(missing)
    for part in missing:
        spelled = part.replace("_", ""), plain.replace("_", "")
        is_similar = difflib.SequenceMatcher(None, *spelled).ratio() >= 0.8 and not type_instead(name)
        if plain in PARTS.get(part, "").split() or is_similar:
            return f"name it {part}"
    if remedy := next((remedy for names, remedy in _WITHOUT.items() if plain in names.split()), ""):
        return remedy
    hooks = next(remedy for names, remedy in _WITHOUT.items() if "callback" in names)
    if is_callable and plain.startswith(("after_", "before_", "on_")) and f"{plain}(" not in hooks:
        return hooks
    is_part = any(plain in (part, *names.split()) for part, names in PARTS.items())
    return "" if is_part else type_instead(name) or (f"type {plain}=…" if plain in root_keys() - {"code"} else "")


def type_instead(key: str) -> str:
    """Return a remedy for a key of another library, such as `trainer.max_epochs`; empty if the key is not known."""
    key = key.lower().replace("-", "_")
    typed = _by_name().get(key) or ("" if key.startswith("hydra") else _by_name().get(key.rpartition(".")[2], ""))
    return f"type {typed}" if typed else ""


@cache
def _by_name() -> dict[str, str]:
    return {name: typed for typed, names in NAMES.items() for name in names.split()}
