"""What users of other asynchronous trainers have reported, and the tests here of the same kind of failure."""

REPORTED: dict[str, tuple[str, ...]] = {
    "a weight transfer hangs for ever without a word (trl 6796, 6797)": (
        "test_weight_sync.py::test_a_peer_that_does_not_receive_ends_the_push_and_not_the_gathering",
        "test_weight_sync.py::test_a_peer_process_that_dies_or_stops_in_the_middle_ends_the_send",
        "test_waits.py::test_a_vllm_that_accepts_calls_and_never_answers_is_named_with_the_flag",
    ),
    "trainer and vLLM do not find each other: localhost, 0.0.0.0, the store (trl 2923, 3706, 3736, 3925)": (
        "test_security.py::test_the_weight_groups_store_listens_on_loopback_alone",
        "test_security.py::test_torchruns_stores_listen_on_loopback_alone",
    ),
    "a random stall without an error, an event loop that stood for minutes (prime-rl 1713)": (
        "test_watchdog.py::test_a_loop_that_does_not_move_has_the_limit_of_its_role",
        "test_watchdog.py::test_a_push_on_a_side_thread_does_not_hide_a_stuck_rank",
        "test_waits.py::test_a_vllm_whose_loop_has_stopped_ends_its_process_by_name",
    ),
    "ranks sit in a collective while rank 0 waits, until NCCL's watchdog kills them (prime-rl 2337)": (
        "test_trainer_loop.py::test_a_starving_rank_makes_both_wait_in_a_named_place_until_its_deadline",
        "test_waits.py::test_the_libraries_limits_are_longer_than_ours",
        "test_resume_runs.py::test_a_rank_that_never_reaches_the_others_collective_is_named",
    ),
    "trainer and rollouts wait for each other's version after a long evaluation (prime-rl 1667)": (
        "test_ingest.py::test_an_evaluation_is_played_while_training_goes_on",
        "test_trainer_loop.py::test_the_last_weights_can_be_the_best_while_the_evaluation_before_is_still_played",
    ),
    "a call without a timeout (prime-rl 2673)": ("test_waits.py::test_every_call_that_could_wait_for_ever_is_known_and_has_a_reason",),
    "errors of the games' processes reach nobody (prime-rl 3140)": (
        "test_faults.py::test_a_poisoned_game",
        "test_supervisor.py::test_a_role_that_dies_at_once_three_times_ends_the_run_with_its_last_lines",
    ),
    "a start, or a rollout, hangs without a message (verl 12, 3895, 6583)": (
        "test_supervisor.py::test_a_role_that_never_gets_ready_leaves_its_stacks_and_is_ended",
        "test_rollout.py::test_a_replica_that_never_answers_ends_the_wait_by_name",
    ),
    "one stuck rollout holds its whole group up, for good (NeMo-RL 3238)": (
        "test_faults.py::test_a_role",
        "test_rollout.py::test_a_process_whose_step_hangs",
    ),
    "a deadlock on resume when the buffer holds a whole batch already (NeMo-RL 3066)": (
        "test_replay.py::test_a_full_ring_starts_a_step_that_could_never_get_more",
        "test_trainer_loop.py::test_ranks_go_on_where_they_stopped",
    ),
    "connection refused after an update; generation left paused (slime 699, 2168; areal 1160)": (
        "test_recovery.py::test_a_push_whose_receiver_is_killed_begins_again_with_its_successor",
        "test_recovery.py::test_without_staging_a_push_that_breaks_half_way_is_done_again_and_vllm_goes_on",
        "test_faults_vllm.py::test_while_vllm_stands",
    ),
    "the trainer waits for a batch and says nothing (Trinity-RFT 182)": (
        "test_health.py::test_the_table_shows_a_wait",
        "test_health.py::test_a_wait_warns_at_30_seconds_and_doubling",
    ),
    "a gather block by block meets the sends (open-instruct 993, 1649)": ("test_weight_sync.py::test_two_ranks_push_a_sharded_model",),
    "truncated episodes: dropped ones shift the advantages, masks are missing (open-instruct 1794; trl 3229, 3248, 4976)": (
        "test_collect.py::test_masked_truncated_episodes_count_in_the_statistics_only",
    ),
    "a batch without trainable tokens ends the run (prime-rl 3223)": (
        "test_collect.py::test_a_group_in_which_nothing_was_trained_is_rejected",
        "test_collect.py::test_a_group_without_signal",
    ),
    "long episodes are played again and again and never trained (tinker-cookbook 822)": (
        "test_ingest.py::test_rollouts_play_no_more_than_there_is_room_for",
    ),
    "prompts are skipped after a resume (NeMo-RL 3599)": (
        "test_resume_runs.py::test_a_run_that_is_killed_whole_goes_on_without_losing_or_repeating_an_episode",
    ),
    "buffered samples are dropped, and the checkpoint reports success (OpenRLHF 1322)": (
        "test_saved_ring.py::test_the_same_ranks_get_their_own_samples_back_with_uses_and_lags",
    ),
    "samples in flight are lost, a step counts twice (verl 4199, 7037, 7762, 7935)": (
        "test_resume_runs.py::test_a_run_whose_trainer_rank_is_killed_starts_again_by_itself",
        "test_resume_live.py::test_a_run_that_is_killed_whole_goes_on_without_losing_or_repeating_an_episode",
    ),
    "checkpoints that are half written, or of several moments (prime-rl 748, 1712, 3164)": (
        "test_saved_ring.py::test_a_cut_leaves_out_what_is_committed_after_it_began",
        "test_resume.py::test_a_damaged_state_is_named_and_the_one_before_is_used",
        "test_resume.py::test_a_full_disk_leaves_the_older_state_and_two_ranks_go_on_as_one",
    ),
    "which weights vLLM has after a resume (trl 3247, 3252; open-instruct 1627)": (
        "test_resume_live.py::test_a_run_that_is_killed_whole_goes_on_without_losing_or_repeating_an_episode",
    ),
    "orphans hold the machine after the launcher was killed (prime-rl 2158)": ("test_supervisor.py::test_after_kill_9_nothing_is_left",),
    "vLLM's front lives and its engine is dead (trl 3408; vllm 1908, 7633, 16259)": ("test_faults_vllm.py::test_vllm",),
    "a fixed port, and the second run dies (trl 3979; verl 6677)": (
        "test_launch_sh.py::test_torchrun_uses_one_machine_and_a_free_port",
        "test_faults.py::test_two_runs_side_by_side",
    ),
    "NCCL_CUMEM_ENABLE differs between trainer and vLLM (SkyRL 143; areal 417)": (
        "test_environment.py::test_both_sides_of_the_weight_group_have_the_same_nccl_memory",
    ),
    "memory grows, shared memory is left behind (DeepEyes 113; vllm 8933)": (
        "test_push_memory.py::test_whole_models_leave_nothing_behind",
        "test_supervisor.py::test_shared_memory_of_a_killed_process",
        "test_config.py::test_a_small_dev_shm_is_refused_with_the_size_needed",
    ),
}
"""Names may be the beginnings of longer ones."""
