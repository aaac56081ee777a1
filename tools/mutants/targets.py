"""Which file is held by which tests, and how many faults of it are planted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    path: str
    tests: tuple[str, ...]
    count: int = 2
    interpreted: bool = False  # a Triton kernel: its tests run under TRITON_INTERPRET=1


def _cpu(op: str, count: int, *sources: str) -> list[Target]:
    tests = (f"tests/ops/test_{op}.py", f"tests/ops/test_cpu_{op}.py")
    return [Target(f"csrc/cpu/{source}", tests, count) for source in sources]


OPS = "retro_kernels/ops"
CALLS = tuple(f"tests/ops/test_{name}.py" for name in ("validation", "repeated_calls", "transforms"))
TARGETS = (
    *_cpu("leaky_average", 3, "leaky_average.cpp"),
    *_cpu("topk_chunks", 2, "topk_scan.h", "topk_chunks.cpp", "topk_chunks_backward.cpp"),
    *_cpu(
        "relative_attention",
        2,
        "relative_attention_fwd.cpp",
        "relative_attention_bwd.cpp",
        "relative_attention_tile.h",
        "partition.h",
    ),
    *_cpu("chunked_cross_attention", 2, "chunked_cross_attention_fwd.cpp", "chunked_cross_attention_bwd.cpp"),
    *[
        Target(f"csrc/cpu/{op}.cpp", (f"tests/ops/test_{op}.py", "tests/ops/test_repeated_calls.py"), 2)
        for op in ("linear", "rms_norm", "cross_entropy")
    ],
    Target("csrc/cpu/relative_logits.cpp", ("tests/ops/test_relative_logits.py",), 3),
    Target(
        "csrc/cpu/dropout.h",
        ("tests/ops/test_cpu_relative_attention.py", "tests/ops/test_cpu_chunked_cross_attention.py"),
        2,
    ),
    Target("csrc/text/match.cpp", ("tests/model/test_text.py",), 2),
    Target("csrc/text/minhash.cpp", ("tests/model/test_text.py",), 2),
    Target("csrc/text/suffix_automaton.h", ("tests/model/test_text.py",), 2),
    Target("retro_kernels/core/arguments.py", ("tests/ops/test_validation.py", "tests/ops/test_contract.py"), 4),
    Target(
        "retro_kernels/core/backends.py",
        tuple(f"tests/ops/test_{name}.py" for name in ("validation", "contract", "fallback", "linear")),
        3,
    ),
    Target("retro_kernels/core/operator.py", ("tests/ops/test_contract.py", "tests/ops/test_transforms.py"), 2),
    Target("retro_kernels/core/transforms.py", ("tests/ops/test_transforms.py",), 3),
    Target("retro_kernels/core/native.py", ("tests/ops/test_size_one.py", "tests/ops/test_cpu_infrastructure.py"), 2),
    Target(
        "retro_kernels/core/eager.py",
        (
            "tests/ops/test_repeated_calls.py",
            "tests/ops/test_plans.py",
            "tests/ops/test_transforms.py",
            "tests/ops/test_linear.py",
            "tests/ops/test_contract.py",
        ),
        40,  # a key there is made by `add`, a statement a part
    ),
    Target("retro_kernels/core/plan.py", ("tests/ops/test_repeated_calls.py", "tests/ops/test_plans.py"), 3),
    *[
        Target(f"{OPS}/{op}/call.py", (f"tests/ops/test_{op}.py", *CALLS), 2)
        for op in ("chunked_cross_attention", "leaky_average", "merge_attention")
        + ("relative_attention", "relative_logits", "topk_chunks")
    ],
    *[
        Target(f"{OPS}/{op}/{file}.py", (f"tests/ops/test_{op}.py", *CALLS[1:]), 2)
        for op in ("linear", "rms_norm", "cross_entropy")
        for file in ("call", "cpu")
    ],
    Target(
        "retro_kernels/compile/configs.py",
        ("tests/aot/test_configs.py", "tests/bench/test_tune.py", "tests/ops/test_repeated_calls.py"),
        2,
    ),
    Target("retro_kernels/reference_lib/attention.py", ("tests/reference",), 3),
    Target("retro_kernels/ops/topk_chunks/reference.py", ("tests/reference",), 2),
    Target("retro_kernels/testing/errors.py", ("tests/reference/test_errors.py",), 2),
    Target(f"{OPS}/leaky_average/triton/kernels.py", ("tests/ops/test_leaky_average.py",), 2, interpreted=True),
    Target(
        "retro_kernels/ops/relative_logits/triton/kernels.py",
        ("tests/ops/test_relative_logits.py",),
        2,
        interpreted=True,
    ),
    Target(
        "retro_model/layers/attention.py",
        tuple(f"tests/model/test_{name}.py" for name in ("layers", "retro", "cache", "sequence_parallel")),
        2,
    ),
    Target("retro_model/layers/positions.py", ("tests/model/test_layers.py", "tests/model/test_retro.py"), 2),
    Target(
        "retro_model/generation/sampling.py",
        ("tests/model/test_generation.py", "tests/model/test_generation_protocol.py"),
        3,
    ),
    Target("retro_model/data/store.py", ("tests/model/test_store.py", "tests/model/test_hostile_folders.py"), 3),
    Target(
        "retro_model/data/neighbours.py", ("tests/model/test_neighbours.py", "tests/model/test_hostile_folders.py"), 2
    ),
    Target("retro_model/data/database.py", ("tests/model/test_database.py", "tests/model/test_neighbours.py"), 2),
    Target("retro_model/data/dedup.py", ("tests/model/test_dedup.py",), 2),
    Target("retro_model/evaluation/in_context.py", ("tests/model/test_decoder_scores.py",), 2),
    Target("retro_model/evaluation/leaks.py", ("tests/model/test_evaluation.py", "tests/model/test_commands.py"), 2),
    Target("retro_model/evaluation/scoring.py", ("tests/model/test_evaluation.py",), 2),
    Target("retro_model/evaluation/suffixes.py", ("tests/model/test_suffixes.py",), 2),
    Target("retro_model/evaluation/knn_lm.py", ("tests/model/test_suffixes.py",), 2),
    Target("retro_model/training/step.py", ("tests/model/test_training.py",), 2),
    Target(
        "retro_model/training/checkpoint_folder.py",
        ("tests/model/test_checkpoint.py", "tests/model/test_sharded_checkpoint.py"),
        3,
    ),
    Target("retro_model/training/sharded_checkpoint.py", ("tests/model/test_sharded_checkpoint.py",), 3),
    Target("retro_model/memory_mosaics/cache.py", ("tests/model/memory_mosaics",), 3),
    Target("retro_model/data/executors.py", ("tests/model/test_shards.py",), 3),
    Target("retro_model/apps/serve/app.py", ("tests/model/serving/test_app.py", "tests/model/serving/test_load.py"), 4),
    Target("retro_model/training/batches.py", ("tests/model/test_training.py",), 2),
    Target("retro_model/retro/retrieval.py", ("tests/model/test_retro.py", "tests/model/test_cache.py"), 2),
    Target(
        "retro_model/retro/retrofitted_decoder.py",
        ("tests/model/test_retrofit.py", "tests/model/test_retrofit_abroad.py"),
        2,
    ),
    Target(
        "retro_model/retro/frozen_decoder.py", ("tests/model/test_retrofit.py", "tests/model/test_own_attention.py"), 2
    ),
    Target("retro_model/retro/own_attention.py", ("tests/model/test_own_attention.py",), 2),
    Target("retro_model/retro/own_pass.py", ("tests/model/test_own_attention.py",), 2),
    Target(
        "retro_model/integrations/huggingface.py",
        ("tests/model/test_huggingface.py", "tests/model/test_retrofit_abroad.py"),
        2,
    ),
    Target("bench/check/numerics.py", ("tests/bench/test_work.py", "tests/bench/test_run.py"), 2),
    Target("bench/check/topk.py", ("tests/bench/test_work.py",), 2),
    Target("bench/compare/gate_statistics.py", ("tests/bench/test_gate_statistics.py",), 3),
    Target("bench/compare/record_files.py", ("tests/bench/test_reports.py",), 2),
    Target("bench/records/machines.py", ("tests/bench/test_reports.py",), 1),
    Target(
        "bench/records/record.py",
        ("tests/bench/test_record.py", "tests/bench/test_reports.py", "tests/bench/test_killed.py"),
        3,
    ),
    Target("bench/static/sass.py", ("tests/bench/test_static_records.py",), 3),
    Target("bench/static/regressions.py", ("tests/bench/test_static_records.py",), 2),
    Target("bench/ops/leaky_average.py", ("tests/bench/test_work.py", "tests/bench/test_commands.py"), 1),
    Target("bench/ops/relative_attention.py", ("tests/bench/test_work.py", "tests/bench/test_commands.py"), 2),
)
