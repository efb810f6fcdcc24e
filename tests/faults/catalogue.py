"""The list of faults: wrong functions that a test must find, in all rooms of the package.

Arguments have the names of the right function, so that a wrong one can be called as it is.
"""

import contextlib
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from rich.text import Text

from tests.faults.fault import Fault

FAULTS = (
    # The algorithm: lookahead and drafts.
    Fault(
        "n-grams of the window begin with a stale token",
        "jlade.lookahead.window.ngrams",
        lambda right: lambda window, current, predicted: right(window, window[0, 0], predicted),
        ("tests/lookahead/test_window.py::test_ngrams_are_columns_closed_by_the_new_tokens",),
    ),
    Fault(
        "a step of the window drops its newest row",
        "jlade.lookahead.window.advance",
        lambda right: lambda window, predicted: right(window[::-1], predicted),
        ("tests/lookahead/test_window.py::test_advance_drops_the_oldest_row",),
    ),
    Fault(
        "a token of the window sees all tokens before it in the block",
        "jlade.lookahead.block.window",
        lambda right: (
            lambda window_size, ngram_size: (layout := right(window_size, ngram_size))._replace(
                mask=np.tri(len(layout.mask), dtype=bool)
            )
        ),
        ("tests/lookahead/test_block.py::test_equals_the_table",),
    ),
    Fault(
        "greedy verification accepts a token too many",
        "jlade.lookahead.verification.verify_by_matching",
        lambda right: (
            lambda tree, next_token, predicted, max_accepted: (
                agreed := right(tree, next_token, predicted, max_accepted)
            )._replace(num_accepted=jnp.minimum(agreed.num_accepted + 1, max_accepted))
        ),
        ("tests/lookahead/test_verification.py::test_accepts_what_the_walk_accepts",),
    ),
    Fault(
        "rejection sampling tries the first draft alone",
        "jlade.lookahead.verification.verify_by_rejection",
        lambda right: (
            lambda key, tree, next_logits, logits, max_accepted: right(
                key,
                tree.replace(tokens=jnp.where(jnp.arange(len(tree.tokens)) < max_accepted - 1, tree.tokens, -1)),
                next_logits,
                logits,
                max_accepted,
            )
        ),
        ("tests/lookahead/test_verification.py::test_rejection_has_the_law_of_algorithm_4",),
    ),
    Fault(
        "the rest until the next forecast does not grow",
        "jlade.lookahead.adaptive.choose",
        lambda right: lambda pace, *step: right(pace.replace(wait=jnp.int32(0)), *step),
        ("tests/lookahead/test_adaptive.py::test_plain_steps_rest_for_longer_while_forecasts_advise_them",),
    ),
    Fault(
        "each device computes the whole block",
        "jlade.lookahead.division.balance",
        lambda right: lambda setting, num_devices: right(setting, 1) * num_devices,
        ("tests/lookahead/test_division.py::test_no_share_is_larger_than_needed",),
    ),
    Fault(
        "of new n-grams a full pool evicts the newest",
        "jlade.drafts.pool.insert",
        lambda right: lambda pool, ngrams, valid: right(pool, ngrams[::-1], valid[::-1]),
        ("tests/drafts/test_pool.py::test_insert_equals_inserting_one_by_one",),
    ),
    Fault(
        "a merged tree keeps the least promising drafts",
        "jlade.drafts.tree.merge",
        lambda right: (
            lambda proposals, sources, costs, size: right(proposals, sources, jnp.max(costs) + 1 - costs, size)
        ),
        ("tests/drafts/test_tree.py::test_the_cheapest_paths_are_kept_and_equal_ones_are_one",),
    ),
    # Decoding.
    Fault(
        "a text goes on after an end token",
        "jlade.decoding.stopping.cut",
        lambda right: (
            lambda stopping, stop_state, tokens, num_accepted, num_generated: right(
                stopping.replace(eos_ids=jnp.full_like(stopping.eos_ids, -1)),
                stop_state,
                tokens,
                num_accepted,
                num_generated,
            )
        ),
        ("tests/decoding/test_stopping.py::test_every_set_of_end_tokens_ends_the_text_where_it_is_found",),
    ),
    Fault(
        "the repetition penalty leaves out the prompt",
        "jlade.decoding.sampling.process",
        lambda right: (
            lambda logits, sampling, prompt, generated: right(
                logits, sampling, None if prompt is None else 0 * prompt, generated
            )
        ),
        ("tests/decoding/test_sampling.py::test_processing_equals_numpy",),
    ),
    Fault(
        "the noise of a token belongs to its place in the block",
        "jlade.decoding.sampling.noise_at",
        lambda right: (
            lambda key, positions, vocab_size: right(key, jnp.arange(len(positions), dtype=positions.dtype), vocab_size)
        ),
        ("tests/decoding/test_sampling.py::test_coupled_sampling_equals_the_reference",),
    ),
    Fault(
        "penalties count rejected drafts",
        "jlade.decoding.sampling.count_accepted",
        lambda right: lambda counts, tokens, num_accepted: right(counts, tokens, jnp.int32(len(tokens))),
        ("tests/decoding/test_sampling.py::test_coupled_sampling_equals_the_reference",),
    ),
    Fault(
        "end tokens are never banned",
        "jlade.decoding.sampling.ban",
        lambda right: lambda logits, token_ids, where, vocabulary: logits,
        ("tests/decoding/test_stopping.py::test_before_min_new_tokens_nothing_ends_a_text",),
    ),
    Fault(
        "a row of a request has the keys of all rows",
        "jlade.decoding.state.Inputs.rows",
        lambda right: lambda self, indices: right(self, indices).replace(key=self.key),
        ("tests/generation/test_turns.py::test_rows_are_the_inputs_of_their_prompts",),
    ),
    Fault(
        "programs copy the memory that they take over",
        "jlade.decoding.ahead.jit",
        lambda right: lambda donate_argnames=(), **others: right(**others),
        ("tests/generation/test_programs.py::test_memory_is_still_taken_over",),
    ),
    Fault(
        "programs of an engine go like all others",
        "jlade.decoding.room.Keeper.keeping",
        lambda right: lambda self: contextlib.nullcontext(),
        ("tests/decoding/test_room.py::test_an_engine_keeps_its_programs_while_it_runs",),
    ),
    Fault(
        "no program is noted as used",
        "jlade.decoding.room.Programs.use",
        lambda right: lambda self: None,
        ("tests/decoding/test_room.py::test_programs_not_used_for_longest_go_and_compile_again",),
    ),
    # Constraints.
    Fault(
        "a constraint forgets the tokens that a step accepts",
        "jlade.constraints.constraint.after_accepted",
        lambda right: lambda constraint, states, path, tokens, num_accepted: jax.tree.map(lambda x: x[0], states),
        ("tests/constraints/test_constraint.py::test_greedy_texts_are_those_of_plain_constrained_decoding",),
    ),
    Fault(
        "a text leaves a counted loop too early",
        "jlade.constraints.moves.is_allowed",
        lambda right: lambda state, move, minimum, maximum: right(state, move, 0 * minimum, maximum),
        ("tests/constraints/test_tokens.py::test_a_token_is_allowed_where_its_bytes_lead_on",),
    ),
    Fault(
        "a text has a character more than it may",
        "jlade.constraints.automaton.counted",
        lambda right: (
            lambda part, counter, minimum, maximum: right(
                part, counter, minimum, None if maximum is None else maximum + 1
            )
        ),
        ("tests/constraints/test_automaton.py::test_characters_are_counted",),
    ),
    Fault(
        "true is 1 in JSON",
        "jlade.constraints.json_document.equal",
        lambda right: lambda first, second: first == second,
        ("tests/constraints/test_json_schema.py::test_instances",),
    ),
    # Models.
    Fault(
        "a soft cap is a hard one",
        "jlade.models.nn.cap",
        lambda right: lambda x, bound: x if bound is None else jnp.clip(x, -bound, bound),
        ("tests/models/attention/test_attend.py::test_own_scale_cap_and_sinks",),
    ),
    Fault(
        "rotations are not scaled",
        "jlade.models.rotary.inverse_frequencies",
        lambda right: lambda head_dim, theta, scaling=None: right(head_dim, theta),
        ("tests/models/test_rotary.py",),
    ),
    Fault(
        "a sliding window has a token too many",
        "jlade.models.attention.plain.attend_in_chunks",
        lambda right: lambda operands, *, window, **others: right(operands, window=window and window + 1, **others),
        ("tests/models/attention/test_attend.py::test_equals_plain_attention",),
    ),
    Fault(
        "attention reads the first unused entry of the cache",
        "jlade.models.attention.plain.attend_in_chunks",
        lambda right: (
            lambda operands, **others: right(operands._replace(cached_length=operands.cached_length + 1), **others)
        ),
        ("tests/models/attention/test_attend.py::test_entries_of_the_cache_beyond_its_length_are_not_read",),
    ),
    Fault(
        "of equal scores of an index the last token is chosen",
        "jlade.models.attention.choice.best",
        lambda right: lambda scores, visible, number: right(scores[..., ::-1], visible[..., ::-1], number)[..., ::-1],
        ("tests/models/test_index.py::test_the_best_tokens_are_chosen_and_the_first_of_equal_ones",),
    ),
    Fault(
        "a commit writes a rejected token after the accepted ones",
        "jlade.models.base.scatter",
        lambda right: (
            lambda layers, blocks, length, indices, num_accepted, table=None, *, kinds: right(
                layers, blocks, length, indices, num_accepted + 1, table, kinds=kinds
            )
        ),
        ("tests/models/test_commit.py::test_commit_writes_the_accepted_tokens_and_nothing_else",),
    ),
    Fault(
        "a layer without keys reads those of the last layer, whatever its window",
        "jlade.models.architecture.LlamaConfig.kv_sources",
        lambda right: (
            lambda self: tuple(min(i, self.num_layers - self.shared_kv_layers - 1) for i in range(self.num_layers))
        ),
        ("tests/models/test_gemma4.py::test_a_layer_without_keys_reads_the_last_one_of_its_kind",),
    ),
    Fault(
        "the scale of int8 rows is that of 128 steps",
        "jlade.models.quantization.quantize_matrix",
        lambda right: lambda matrix: (found := right(matrix)).replace(scale=found.scale * 127 / 128),
        ("tests/models/test_quantization.py::test_no_element_moves_by_more_than_half_a_step",),
    ),
    Fault(
        "a kernel multiplies the upper four bits by the inputs of the lower ones",
        "jlade.models.products.parts_of",
        lambda right: lambda stored, is_place=False: right(stored, is_place)[::-1],
        ("tests/models/test_grouped.py::test_simulated_kernels_give_the_product",),
    ),
    Fault(
        "a convolution takes the tokens before a token in the block, not its ancestors",
        "jlade.models.layers.recurrent.ancestry",
        lambda right: lambda mask, taps: right(np.broadcast_to(np.tri(mask.shape[-1], dtype=bool), mask.shape), taps),
        ("tests/models/test_recurrent.py::test_the_taps_of_a_token_are_its_own_last_tokens",),
    ),
    Fault(
        "a token of a tree has the state after the text alone",
        "jlade.models.delta_rule.solve",
        lambda solve: lambda lower, right: solve(0 * lower, right),
        ("tests/models/test_recurrent.py::test_every_token_of_a_random_tree",),
    ),
    Fault(
        "tokens see those that pad their block",
        "jlade.models.llama.pad_block",
        lambda right: (
            lambda platform, tokens, positions, mask: (
                *(padded := right(platform, tokens, positions, mask))[:2],
                jnp.asarray(padded[2]).at[..., mask.shape[-1] :].set(True),
            )
        ),
        ("tests/models/test_padding.py::test_padded_blocks_give_the_same_results",),
    ),
    # Generation.
    Fault(
        "a sequence has the prediction of another one",
        "jlade.generation.earlier.read_prediction",
        lambda right: lambda prediction, *others: right(prediction[::-1], *others),
        ("tests/generation/test_turns.py::test_what_a_call_brings_is_in_its_inputs",),
    ),
    Fault(
        "a stop string is cut off a character late",
        "jlade.generation.text.find_stop",
        lambda right: lambda text, begin, stop: (found := right(text, begin, stop)) and (found[0] + 1, found[1]),
        ("tests/generation/test_text.py::test_text_with_stop_strings_does_not_depend_on_how_it_was_cut_into_pieces",),
    ),
    Fault(
        "the cache of an earlier turn is reused a token beyond the text that it shares",
        "jlade.generation.earlier.reuse",
        lambda right: (
            lambda state, prompts, params, decoder, capacity: (
                (cache := right(state, prompts, params, decoder, capacity)) and cache.replace(length=cache.length + 1)
            )
        ),
        ("tests/generation/test_turns.py::test_a_text_that_leaves_the_earlier_one_is_read_from_there",),
    ),
    Fault(
        "each length of a prompt has a program of its own",
        "jlade.generation.prompts.round_up",
        lambda right: lambda number, smallest: number,
        ("tests/generation/test_generate.py::test_the_default_limit_brings_no_other_capacities",),
    ),
    Fault(
        "an engine runs the programs of another one",
        "jlade.generation.saved_programs.SavedPrograms.are_for",
        lambda right: lambda self, facts: True,
        ("tests/engine/test_made_ahead.py::test_each_difference_is_named_when_the_engine_is_made",),
    ),
    # Engine.
    Fault(
        "low priorities come first",
        "jlade.engine.scheduler.Scheduler.add",
        lambda right: lambda self, request, priority=0: right(self, request, -priority),
        ("tests/engine/test_scheduler.py::test_any_order_of_events_equals_a_sorted_list",),
    ),
    Fault(
        "a cancelled request keeps its place in the queue",
        "jlade.engine.scheduler.Scheduler.remove",
        lambda right: lambda self, request: right(self, request) if request in self.rows else None,
        ("tests/engine/test_scheduler.py::test_any_order_of_events_equals_a_sorted_list",),
    ),
    Fault(
        "a prefix is reused a token beyond its match",
        "jlade.engine.prefixes.num_shared",
        lambda right: lambda tokens, others: right(tokens, others) + 1,
        ("tests/engine/test_prefixes.py::test_any_order_of_events_equals_a_search_of_all_texts",),
    ),
    Fault(
        "a prefix serves the prompts of another key",
        "jlade.engine.prefixes.Prefixes._num_shared",
        lambda right: lambda self, tokens, key, entry: right(self, tokens, entry.key, entry),
        ("tests/engine/test_prefixes.py::test_any_order_of_events_equals_a_search_of_all_texts",),
    ),
    Fault(
        "a page is free while a text holds it",
        "jlade.engine.pages.Allocator.share",
        lambda right: lambda self, pages: [self._num_holders.__setitem__(page, 1) for page in pages],
        ("tests/engine/test_pages.py::test_any_order_of_events_equals_a_count_of_the_texts_of_each_page",),
    ),
    Fault(
        "a request gets the answers of another key",
        "jlade.engine.remembered.Remembered.find",
        lambda right: lambda self, key, prompt, size: right(self, next(iter(self._of_key), key), prompt, size),
        ("tests/engine/test_remembered.py::test_any_order_of_events_equals_a_search_of_all_texts",),
    ),
    Fault(
        "a row without a request goes on with the text of another",
        "jlade.engine.rows.resize",
        lambda right: lambda state, places, config: right(state, np.maximum(places, 0), config),
        ("tests/engine/test_running.py::test_rows_move_with_all_that_they_hold",),
    ),
    # Server.
    Fault(
        "a compartment is the same for all API keys",
        "jlade.server.guard.compartment",
        lambda right: lambda scope, key: right({}, key),
        ("tests/server/test_drafts.py::test_compartments_differ_by_api_key_and_reveal_none",),
    ),
    Fault(
        "a page of another host may ask a server without a key",
        "jlade.server.guard._is_this_machine",
        lambda right: lambda host: True,
        ("tests/server/test_app.py::test_without_keys_a_foreign_page_is_refused",),
    ),
    Fault(
        "a line of a stream is divided at characters that end lines",
        "jlade.server.fields.to_json",
        lambda right: lambda body: right(body).replace("\\u2028", "\u2028"),
        ("tests/server/test_protocol.py::test_a_body_is_one_line_whatever_divides_lines",),
    ),
    Fault(
        "all choices of a body have the key of its seed",
        "jlade.server.choices.key",
        lambda right: lambda seed, number: right(seed, 0),
        ("tests/server/test_client.py::test_choices_are_interleaved_by_index",),
    ),
    # Conversion.
    Fault(
        "infinite values of a file are not seen",
        "jlade.conversion.weight_files.broken_rows",
        lambda right: lambda source, converted, first: set(),
        ("tests/conversion/test_gguf.py::test_values_that_are_not_finite_are_named",),
    ),
    Fault(
        "a file may change while it is read",
        "jlade.conversion.weight_files.check_unchanged",
        lambda right: lambda tensors: None,
        ("tests/conversion/test_round_trip.py::test_a_file_that_changes_while_it_is_read_is_refused",),
    ),
    Fault(
        "an index may name files of other directories",
        "jlade.conversion.json_files.is_file_name",
        lambda right: lambda name: True,
        ("tests/conversion/test_huggingface.py::test_an_index_that_names_no_files_of_its_directory_is_refused",),
    ),
    Fault(
        "packed numbers are in the order of their bits",
        "jlade.conversion.hf_packed.unpack_integers",
        lambda right: lambda packed, bits, axis, places=None: right(packed, bits, axis),
        ("tests/conversion/test_packed.py::test_values_are_those_of_the_formula",),
    ),
    Fault(
        "the scale of an adapter is upside down",
        "jlade.conversion.adapter_config.AdapterConfig.scale",
        lambda right: lambda self, module: 1 / right(self, module),
        ("tests/conversion/test_adapter.py::test_weights_by_hand",),
    ),
    Fault(
        "bans of a checkpoint are not read",
        "jlade.conversion.generation_settings.suppressed_tokens",
        lambda right: lambda settings: [],
        ("tests/conversion/test_gguf.py::test_other_settings_of_sampling_are_said_and_tokens_suppressed",),
    ),
    Fault(
        "rows of queries are in the order of the file",
        "jlade.conversion.gguf_tensors._neighbours",
        lambda right: lambda count, head_dim: np.arange(count),
        ("tests/conversion/test_gguf_architectures.py::test_arrays_and_settings_are_those_of_the_checkpoint",),
    ),
    Fault(
        "a key that changes a family is ignored",
        "jlade.conversion.gguf_config._check",
        lambda right: lambda file, key, *accepted: None,
        ("tests/conversion/test_gguf.py::test_files_that_are_refused",),
    ),
    Fault(
        "words of all vocabularies are divided as those of GPT-2",
        "jlade.conversion.gguf_tokenizer._name_of_split",
        lambda right: lambda values: "gpt-2",
        ("tests/conversion/test_gguf_tokenizer.py::test_tokens_of_each_name_are_those_of_llama_cpp",),
    ),
    # The costs of steps.
    Fault(
        "a stored number may be infinite",
        "jlade.costs.choice.positive",
        lambda right: lambda value: float(value),
        ("tests/costs/test_choice.py::test_a_broken_file_is_ignored_with_a_warning_and_written_anew",),
    ),
    Fault(
        "arithmetic and memory traffic overlap on a CPU",
        "jlade.costs.estimate.time",
        lambda right: lambda rates, operations: right(rates._replace(overlaps=True), operations),
        ("tests/costs/test_estimate.py::test_arithmetic_and_reading_add_up_on_a_cpu",),
    ),
    # Inspection, evaluation and the check of decoders.
    Fault(
        "an array of bool takes an eighth of its bytes",
        "jlade.inspection.hlo.ArrayShape.num_bytes",
        lambda right: lambda self: self.size // 8 if self.dtype == "pred" else right(self),
        ("tests/inspection/test_compiled.py::test_bytes_of_dtypes",),
    ),
    Fault(
        "the sign test leaves out the observed number",
        "jlade.evaluation.statistics.sign_test",
        lambda right: lambda fewer, more: right(fewer - 1, more + 1),
        ("tests/evaluation/test_statistics.py::test_the_sign_test_counts_tosses_of_coins",),
    ),
    Fault(
        "the check of a decoder takes all logits for equal",
        "jlade.testing.checks.TestedDecoder.require_equal",
        lambda right: lambda self, got, expected, message: None,
        ("tests/testing/test_decoder.py::test_wrong_results_are_found",),
    ),
    # Integrations and the command.
    Fault(
        "drafts for vLLM follow matches of all tokens but the last",
        "jlade.integrations.vllm.longest_match",
        lambda right: lambda text, length: right(text, length - 1),
        ("tests/integrations/test_vllm.py::test_matches_are_those_of_jlade_s_drafts",),
    ),
    Fault(
        "a model can control the terminal",
        "jlade.cli.terminal.visible",
        lambda right: lambda text, style: Text(text, style=style),
        ("tests/cli/test_terminal.py::test_a_model_cannot_control_the_terminal",),
    ),
    # The modules of the top level.
    Fault(
        "a block has a row of the window too many",
        "jlade.config.LookaheadConfig.block_size",
        lambda right: lambda self: right(self) + self.window_size,
        ("tests/test_config.py::test_the_default_is_a_tree_in_a_block_of_the_papers_size",),
    ),
    Fault(
        "a setting of the paper has the usual way to advance",
        "jlade.config.LookaheadConfig.paper",
        lambda right: lambda cls, *sizes, window_advance="step", **others: right(cls, *sizes, **others),
        ("tests/test_config.py::test_every_argument_has_its_place_in_the_setting",),
    ),
    Fault(
        "true and 1.5 are integers",
        "jlade.errors.check_int",
        lambda right: lambda name, value, min_value, max_value=None: right(name, int(value), min_value, max_value),
        ("tests/test_config.py::test_bad_settings_are_refused",),
    ),
    Fault(
        "a mesh has copies of KV heads where there are enough",
        "jlade.mesh.split",
        lambda right: lambda mesh, kv_heads: right(mesh, kv_heads and 1),
        ("tests/test_mesh.py::test_places_of_parameters",),
    ),
    Fault(
        "a file appears before it is whole",
        "jlade.files.written_whole",
        lambda right: contextlib.contextmanager(
            lambda path, *, replace=False, sync=True: (each for each in [pathlib.Path(path)])
        ),
        ("tests/test_files.py::test_an_error_leaves_everything_as_it_was",),
    ),
    Fault(
        "a checkpoint without top-k samples from all tokens",
        "jlade.storage.load_sampling",
        lambda right: lambda path, *, revision=None: dataclasses.replace(right(path, revision=revision), top_k=None),
        ("tests/test_storage.py::test_sampling_of_a_checkpoint",),
    ),
    Fault(
        "of equal logits the last token is taken",
        "jlade.vocabulary.VocabularyShard.argmax",
        lambda right: lambda self, logits: self.size - 1 - right(self, logits[..., ::-1]),
        ("tests/drafts/test_sources.py::test_the_highest_logits_are_found",),
    ),
    Fault(
        "a device takes the tokens of its slice for the first ones",
        "jlade.vocabulary.VocabularyShard.first",
        lambda right: lambda self: jnp.int32(0),
        ("tests/decoding/test_mesh.py::test_settings",),
    ),
)
