"""Table of every field that clients of other servers send in OpenAI's bodies, whose it is, and what becomes of it here.

A null or an empty value is always accepted, and so is a name that is not in the table (`--unknown-fields`). OpenAI's
own fields, with Motley's few additions, are in field_table.py; for a field that is honoured (`works`) that table says
what it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any


class FieldSource(StrEnum):
    """Origin of a field: the server whose API has it, or the client that sends it."""

    OPENAI = "OpenAI"
    VLLM = "vLLM"
    SGLANG = "SGLang"
    LLAMA_CPP = "llama.cpp"
    LLAMA_CPP_PYTHON = "llama-cpp-python"
    OLLAMA = "Ollama"
    OPENROUTER = "OpenRouter"
    TGI = "TGI"
    TRITON = "Triton with TensorRT-LLM"
    LITELLM = "LiteLLM"
    ROUTERS = "vllm-router and sglang-router"
    ANTHROPIC = "Anthropic"
    MISTRAL = "Mistral"
    DEEPSEEK = "DeepSeek"
    TOGETHER = "Together"
    LLAMA_INDEX = "LangChain and LlamaIndex"


class FieldEffect(StrEnum):
    """Effect of a field that has a value."""

    WORKS = "works"
    RENAMED = "the same as"
    SPREAD = "its fields count as the body's"
    CHANGES_NOTHING = "changes nothing here"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ForeignField:
    """One field.

    at       the object that has it, as a path (`messages[].content[]`); empty: the body
    routes   whose bodies have it
    neutral  values beside null and empty ones that ask for what is done anyway; of WORKS: where it does not work, as
             in KServe's protocol
    unbounded   RENAMED: values that ask for no bound; a bound beside them goes before
    is_item     RENAMED: the other field is a list, of which this is the one item
    why      CHANGES_NOTHING and SPREAD: why; REFUSED: what to do instead; RENAMED: the field that it is another name of
    """

    name: str
    sources: tuple[FieldSource, ...]
    effect: FieldEffect
    why: str = ""
    neutral: tuple[Any, ...] = ()
    at: str = ""
    routes: tuple[str, ...] = ("completion", "chat")
    unbounded: tuple[Any, ...] = ()
    is_item: bool = False

    @property
    def path(self) -> str:
        return f"{self.at}.{self.name}" if self.at else self.name

    def is_neutral(self, value: Any) -> bool:
        """True of JSON values alone: 0 is not false."""
        return any(type(value) is type(one) and value == one for one in self.neutral)


class Unbounded(Enum):
    """A value that JSON does not have: it asks for no bound, where an absent field may mean a default bound."""

    VALUE = "unbounded"


UNBOUNDED = Unbounded.VALUE
NO_BOUND = -1  # as `max_tokens`: samples for llama.cpp's server and LM Studio send it


def is_unbounded(max_tokens: Any) -> bool:
    """Return whether this value of `max_tokens` asks for no bound."""
    return max_tokens is UNBOUNDED or (type(max_tokens) is int and max_tokens == NO_BOUND)


S = FieldSource
COMPLETION, CHAT, EMBEDDING, TOKENIZE = ("completion",), ("chat",), ("embedding",), ("tokenize",)
GENERATE = (*COMPLETION, *CHAT)
ALL = (*GENERATE, *EMBEDDING, *TOKENIZE, "detokenize")
_MESSAGE, _PART, _CALL, _TOOL = "messages[]", "messages[].content[]", "messages[].tool_calls[]", "tools[]"


def _works(
    names: str, *sources: FieldSource, neutral: tuple[Any, ...] = (), at: str = "", routes: tuple[str, ...] = GENERATE
) -> Iterator[ForeignField]:
    for name in names.split():
        yield ForeignField(name, sources, FieldEffect.WORKS, neutral=neutral, at=at, routes=routes)


def _same(
    name: str,
    of: str,
    *sources: FieldSource,
    neutral: tuple[Any, ...] = (),
    unbounded: tuple[Any, ...] = (),
    routes: tuple[str, ...] = GENERATE,
    is_item: bool = False,
) -> Iterator[ForeignField]:
    yield ForeignField(
        name, sources, FieldEffect.RENAMED, of, neutral, routes=routes, unbounded=unbounded, is_item=is_item
    )


def _nothing(
    names: str, why: str, *sources: FieldSource, at: str = "", routes: tuple[str, ...] = ALL
) -> Iterator[ForeignField]:
    for name in names.split():
        yield ForeignField(name, sources, FieldEffect.CHANGES_NOTHING, why, at=at, routes=routes)


def _spread(name: str, why: str, *sources: FieldSource) -> Iterator[ForeignField]:
    yield ForeignField(name, sources, FieldEffect.SPREAD, why, routes=GENERATE)


def _refused(
    names: str,
    instead: str,
    *sources: FieldSource,
    neutral: tuple[Any, ...] = (),
    at: str = "",
    routes: tuple[str, ...] = GENERATE,
) -> Iterator[ForeignField]:
    for name in names.split():
        yield ForeignField(name, sources, FieldEffect.REFUSED, instead, neutral, at, routes)


_OUT = "leave it out"
_ONE_MODEL = "one model is served"
_LOG_KEEPS_NONE = "it is for the sender's own use"
_PROXY = "it is for the proxy in between"
_PLACING = "which replica answers is not the client's to choose"
_MARKS = "prefixes are found without marks"
_SAME_TEXT = "the answer's text is the same"
_NO_MEDIA = "the model reads text"
_IS_OFF = "what it belongs to is off"
_WHOLE = "send the whole conversation: its prefix is found again"
_NO_LIMIT = "reasoning_effort says whether the model thinks"
FOREIGN_FIELDS: tuple[ForeignField, ...] = (
    # Sampling.
    *_works("top_k min_p repetition_penalty ignore_eos min_tokens", S.VLLM, S.SGLANG, S.LLAMA_CPP, S.TGI, S.OPENROUTER),
    *_works("stop_token_ids skip_special_tokens", S.VLLM, S.SGLANG, S.ROUTERS),
    *_works("allowed_token_ids bad_words include_stop_str_in_output", S.VLLM),
    *_works("truncate_prompt_tokens truncation_side", S.VLLM, routes=(*GENERATE, *EMBEDDING)),
    *_works("priority", S.VLLM, S.SGLANG, routes=(*GENERATE, *EMBEDDING)),
    *_works("structured_outputs", S.VLLM, S.OPENROUTER, neutral=(True, False)),
    *_works("guided_json guided_regex guided_choice guided_grammar", S.VLLM),
    *_works("regex ebnf json_schema", S.SGLANG, S.ROUTERS),
    *_works("structural_tag", S.VLLM, S.SGLANG),
    *_works("grammar", S.LLAMA_CPP, S.TGI),
    *_works("return_token_ids", S.VLLM, S.SGLANG),
    *_works("return_tokens_as_token_ids", S.VLLM),
    *_works("request_id", S.VLLM, routes=(*GENERATE, *EMBEDDING)),
    *_works("add_special_tokens", S.VLLM, routes=(*COMPLETION, *EMBEDDING, *TOKENIZE)),
    *_works("add_generation_prompt continue_final_message", S.VLLM, S.SGLANG, S.ROUTERS, routes=(*CHAT, *TOKENIZE)),
    *_works("chat_template_kwargs", S.VLLM, S.SGLANG, S.LLAMA_CPP, routes=(*CHAT, *TOKENIZE)),
    *_works("include_reasoning", S.VLLM, S.OPENROUTER, S.ROUTERS, routes=CHAT),
    *_works("reasoning", S.OPENROUTER, routes=CHAT),
    *_works("think", S.OLLAMA, routes=CHAT),
    *_works("thinking", S.ANTHROPIC, S.DEEPSEEK, routes=CHAT),
    *_works("separate_reasoning", S.SGLANG, S.ROUTERS, routes=CHAT),
    *_works("reasoning_format", S.LLAMA_CPP, routes=CHAT),
    *_works("continuous_usage_stats", S.VLLM, S.SGLANG, at="stream_options"),
    *_works("schema", S.LLAMA_CPP, at="response_format"),
    *_works("value", S.TGI, at="response_format"),
    *_works("pattern", S.TOGETHER, at="response_format"),
    *_works("structures triggers", S.VLLM, S.SGLANG, at="response_format"),
    *_works("format", S.OLLAMA),
    *_works("best_of", S.OPENAI, S.VLLM, neutral=(1,)),
    *_works("repeat_penalty", S.LLAMA_CPP, S.OLLAMA, neutral=(1, 1.0)),
    *_works("repeat_last_n", S.LLAMA_CPP, S.OLLAMA, neutral=(-1, 64)),
    *_works("penalize_nl penalize_newline", S.LLAMA_CPP, S.OLLAMA, neutral=(True,)),
    *_works("do_sample", S.TGI, neutral=(True,)),
    # Other names of these.
    *_same("no_stop_trim", "include_stop_str_in_output", S.SGLANG, S.ROUTERS),
    *_same("rid", "request_id", S.SGLANG, S.ROUTERS, routes=(*GENERATE, *EMBEDDING)),
    *_same("sampling_seed", "seed", S.SGLANG, S.ROUTERS),
    *_same("random_seed", "seed", S.MISTRAL),
    *_same("n_predict", "max_tokens", S.LLAMA_CPP, unbounded=(-1, -2)),
    *_same("num_predict", "max_tokens", S.OLLAMA, unbounded=(-1, -2)),
    *_same("max_completion_tokens", "max_tokens", S.OPENAI, routes=COMPLETION),
    *_same("max_output_tokens", "max_tokens", S.OPENAI),
    *_same("min_new_tokens", "min_tokens", S.SGLANG),
    *_same("min_length", "min_tokens", S.TRITON),
    *_same("n_probs", "logprobs", S.LLAMA_CPP, neutral=(0,), routes=COMPLETION),
    *_same("return_logprob", "logprobs", S.SGLANG, neutral=(False,)),
    *_same("top_logprobs_num", "top_logprobs", S.SGLANG, neutral=(0,)),
    *_same("n_cmpl", "n", S.LLAMA_CPP),
    *_same("num_return_sequences", "n", S.TRITON),
    *_same("return_full_text", "echo", S.TGI, routes=COMPLETION),
    *_same("max_new_tokens", "max_tokens", S.TGI, S.SGLANG),
    *_same("stop_sequences", "stop", S.ANTHROPIC, S.TGI),
    *_same("stop_words", "stop", S.TRITON, neutral=([""],)),
    *_same("end_id", "stop_token_ids", S.TRITON, is_item=True),
    *_same("truncate", "truncate_prompt_tokens", S.TGI, S.OLLAMA, neutral=(False,)),
    *_same("enable_thinking", "chat_template_kwargs.enable_thinking", S.SGLANG, routes=CHAT),
    *_same("return_log_probs", "logprobs", S.TRITON, neutral=(False,)),
    *_spread("options", "each may stand beside the prompt", S.OLLAMA),
    *_spread("parameters", "each may stand beside the prompt", S.TGI),
    *_spread("sampling_params", "each may stand beside the prompt", S.SGLANG),
    *_spread("sampling_parameters", "each may stand beside the prompt", S.TRITON),
    # Of the whole request: nothing of the answer depends on it.
    *_nothing("provider models route zdr", _ONE_MODEL, S.OPENROUTER),
    *_nothing("usage", "whole answers always tell it, streams by stream_options", S.OPENROUTER),
    *_nothing("session_id trace debug custom_labels log_metrics no_logs external_trace_header "
              "conversation_id verbose sse_ping_interval",
              _LOG_KEEPS_NONE, S.VLLM, S.SGLANG, S.OPENROUTER, S.LLAMA_CPP),
    *_nothing("data_parallel_rank routed_dp_rank disagg_prefill_dp_rank id_slot", _PLACING, S.SGLANG, S.ROUTERS,
              S.LLAMA_CPP),
    *_nothing("cache_prompt n_cache_reuse", "prefixes are always found again", S.LLAMA_CPP),
    *_nothing("n_keep n_discard shift", "a context is never shifted", S.LLAMA_CPP, S.OLLAMA),
    *_nothing("timings_per_token return_progress return_perf_metrics", "what is measured is in the metrics",
              S.LLAMA_CPP, S.TRITON),
    *_nothing("pad_id", "it is for whoever batches", S.TRITON),
    *_nothing("keep_alive", "the model stays loaded", S.OLLAMA),
    *_nothing("num_ctx num_batch num_gpu main_gpu low_vram vocab_only use_mmap use_mlock num_thread numa f16_kv "
              "num_keep num_gqa rope_frequency_base rope_frequency_scale logits_all",
              "how the model is run is the service's", S.OLLAMA, routes=GENERATE),
    *_nothing("cache_control", _MARKS, S.ANTHROPIC, S.OPENROUTER),
    *_nothing("api_key api_base base_url api_version custom_llm_provider drop_params num_retries max_retries fallbacks "
              "litellm_call_id litellm_logging_obj litellm_metadata litellm_params litellm_session_id "
              "litellm_trace_id model_info proxy_server_request allowed_openai_params extra_headers caching "
              "no-log guardrails tags user_config", _PROXY, S.LITELLM),
    *_nothing("guided_decoding_backend spaces_between_special_tokens stream_interval routed_experts_prompt_start "
              "routed_experts_start_len stream_reasoning return_text_in_logprobs", _SAME_TEXT, S.VLLM, S.SGLANG,
              S.ROUTERS),
    *_nothing("backend_sampling draft_num_predict speculative.n_min speculative.n_max speculative.p_min "
              "speculative.type speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_min_hits "
              "speculative.ngram_m_hits",
              _SAME_TEXT, S.LLAMA_CPP, S.OLLAMA, routes=GENERATE),
    *_nothing("media_io_kwargs mm_processor_kwargs return_mm_kwargs use_audio_in_video max_dynamic_patch "
              "min_dynamic_patch", _NO_MEDIA, S.VLLM, S.SGLANG),
    *_nothing("backend disable_fallback", _SAME_TEXT, S.VLLM, at="structured_outputs"),
    # What would change the answer, and cannot be had here.
    *_refused("parse_tool_calls", "tool_choice none leaves calls in the text", S.LLAMA_CPP, neutral=(True,)),
    *_refused("force_pure_content", "tool_choice none leaves calls in the text", S.LLAMA_CPP, neutral=(False,)),
    *_refused("chat_format chat_parser generation_prompt", "the model's own format is read", S.LLAMA_CPP,
              neutral=(0,)),
    *_refused("use_beam_search", "best_of makes several and keeps the likeliest", S.VLLM, neutral=(False,)),
    *_refused("beam_width num_beams", "best_of makes several and keeps the likeliest", S.TRITON, neutral=(0, 1)),
    *_nothing("early_stopping length_penalty len_penalty", "it belongs to beams, which are off", S.VLLM, S.TRITON,
              routes=GENERATE),
    *_refused("exclude_input_in_output", "give echo", S.TRITON, neutral=(True,), routes=COMPLETION),
    *_refused("exclude_input_in_output", "completions have echo", S.TRITON, neutral=(True,), routes=CHAT),
    *_refused("return_context_logits return_generation_logits return_encoder_output", _OUT, S.TRITON,
              neutral=(False,)),
    *_refused("embedding_bias_words embedding_bias_weights", "give logit_bias", S.TRITON),
    *_refused("guided_decoding_guide_type guided_decoding_guide", "give json_schema, regex or grammar", S.TRITON),
    *_refused("no_repeat_ngram_size", "give frequency_penalty or repetition_penalty", S.TRITON, neutral=(0,)),
    *_refused("prompt_ignore_length", "give presence_penalty or frequency_penalty, which count the output", S.TRITON,
              neutral=(0,)),
    *_refused("detokenize", "give return_token_ids", S.TRITON, neutral=(True,)),
    *_refused("disaggregated_params", "prefill and decode are not apart", S.TRITON),
    *_refused("guided_decoding", "give json_schema, regex or grammar", S.TRITON),
    *_refused("top_p_decay", "give top_p", S.TRITON, neutral=(1, 1.0)),
    *_nothing("top_p_min top_p_reset_ids", _IS_OFF, S.TRITON, routes=GENERATE),
    *_refused("echo", "completions have it", S.VLLM, neutral=(False,), routes=CHAT),
    *_refused("suffix", "text is continued, not filled in", S.OPENAI, routes=CHAT),
    *_refused("input_prefix input_suffix input_extra", "text is continued, not filled in", S.LLAMA_CPP),
    *_refused("n_indent", "write the indentation into the prompt, or give a regex", S.LLAMA_CPP, neutral=(0,)),
    *_refused("parse_special", "text of a special token in a message stays text", S.LLAMA_CPP, neutral=(False,),
              routes=CHAT),
    *_refused("parse_special", "text of a special token is that token", S.LLAMA_CPP, neutral=(True,), routes=TOKENIZE),
    *_refused("include_reasoning", "a completion is its text, all of it; chats can leave that out", S.VLLM,
              S.OPENROUTER, neutral=(True,), routes=COMPLETION),
    *_nothing("parallel_tool_calls", "a completion calls no tools", S.OPENAI, routes=COMPLETION),
    *_refused("add_special_tokens", "the model's template adds them", S.VLLM, neutral=(False,), routes=CHAT),
    *_refused("prompt input", "a chat is its messages; completions take a prompt", S.OPENAI, routes=CHAT),
    *_refused("messages input", "a completion has a prompt; chats take messages", S.OPENAI, routes=COMPLETION),
    *_refused("tools tool_choice functions function_call", "chats have it", S.OPENAI, routes=COMPLETION,
              neutral=("none", "auto")),
    *_refused("chat_template_kwargs reasoning_effort add_generation_prompt continue_final_message",
              "a completion has no template; chats do", S.VLLM, neutral=(True, False), routes=COMPLETION),
    *_refused("prompt messages", "give input", S.OPENAI, S.VLLM, routes=EMBEDDING),
    *_refused("input_ids input_embeds inputs prompt_embedding_table", "give a prompt, or messages of a chat",
              S.SGLANG, S.TGI, S.TRITON),
    *_refused("text", "give a prompt or messages, and response_format for a format", S.SGLANG, S.OPENAI),
    *_refused("documents", "write them into a message", S.VLLM),
    *_refused("logprob_token_ids token_ids_logprob", "give top_logprobs", S.VLLM, S.SGLANG),
    *_refused("logprob_start_len", "completions tell those of the prompt by echo with logprobs", S.SGLANG,
              neutral=(-1,)),
    *_refused("prompt_embeds", "give text or token ids", S.VLLM),
    *_refused("logits_processors custom_logit_processor custom_params vllm_xargs", _OUT, S.VLLM, S.SGLANG),
    *_refused("kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room "
              "bootstrap_pair_key",
              "prefill and decode are not apart", S.VLLM, S.SGLANG, S.ROUTERS),
    *_refused("thinking_token_budget reasoning_budget_tokens thinking_budget_tokens thinking_budget", _NO_LIMIT,
              S.VLLM, S.LLAMA_CPP, neutral=(-1,)),
    *_nothing("reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_message "
              "reasoning_budget_arm_immediately", _IS_OFF, S.LLAMA_CPP, routes=GENERATE),
    *_refused("repetition_detection", "give frequency_penalty or repetition_penalty", S.VLLM),
    *_refused("watermarking watermark", _OUT, S.VLLM, S.TGI, neutral=(False,)),
    *_nothing("separate_reasoning reasoning_format", "a completion is its text, all of it", S.SGLANG, S.ROUTERS,
              S.LLAMA_CPP, routes=COMPLETION),
    *_refused("thinking_forced_open", "the template says whether the prompt begins the reasoning", S.LLAMA_CPP,
              neutral=(False,)),
    *_refused("return_hidden_states return_routed_experts return_cached_tokens_details return_prompt_text "
              "return_token_offsets return_bytes return_entropy return_meta_info", _OUT, S.SGLANG, S.VLLM, S.ROUTERS,
              neutral=(False,)),
    *_refused("return_prompt_token_ids", "give return_token_ids", S.SGLANG, neutral=(False,)),
    *_refused("lora_path lora adapter_id lora_task_id lora_weights lora_config lora_request lora_name", _ONE_MODEL,
              S.SGLANG, S.LLAMA_CPP, S.TGI, S.TRITON, S.ROUTERS),
    *_refused("session_params", _WHOLE, S.SGLANG, S.ROUTERS),
    *_refused("conversation previous_response_id", _WHOLE, S.OPENAI),
    *_refused("instructions", "give a message of role system", S.OPENAI),
    *_refused("truncation", "truncate_prompt_tokens cuts a prompt", S.OPENAI, neutral=("disabled",)),
    *_refused("background", "the answer is the response", S.OPENAI, S.SGLANG, neutral=(False,)),
    *_refused("preset", "give its fields", S.OPENROUTER),
    *_refused("grammar_lazy", "give structural_tag: text is free up to a trigger", S.LLAMA_CPP, neutral=(False,)),
    *_refused("grammar_triggers", "give structural_tag: text is free up to a trigger", S.LLAMA_CPP),
    *_refused("preserved_tokens", "skip_special_tokens: false leaves special tokens in the text", S.LLAMA_CPP),
    *_refused("stop_regex", "give stop, or a regex that the whole text follows", S.SGLANG, S.ROUTERS),
    *_refused("ngram_corpus_id images_config", _OUT, S.SGLANG),
    *_refused("guided_whitespace_pattern", "give a regex or grammar", S.VLLM),
    *_refused("disable_any_whitespace disable_additional_properties", "say it in the schema", S.VLLM, neutral=(False,),
              at="structured_outputs"),
    *_refused("whitespace_pattern", "give a regex or grammar", S.VLLM, at="structured_outputs"),
    *_refused("typical_p tfs_z", "give top_p or min_p", S.LLAMA_CPP, S.OLLAMA, S.TGI, neutral=(1, 1.0)),
    *_refused("top_a mirostat dynatemp_range xtc_probability dry_multiplier", "give top_p or min_p",
              S.LLAMA_CPP, S.OLLAMA, S.OPENROUTER, neutral=(0, 0.0)),
    *_refused("mirostat_mode", "give top_p or min_p", S.LLAMA_CPP_PYTHON, neutral=(0, 0.0)),
    *_refused("logit_bias_type", "give logit_bias as pairs of a text and its bias", S.LLAMA_CPP_PYTHON,
              neutral=("input_ids",)),
    *_refused("min_keep", "give top_p or min_p", S.LLAMA_CPP, neutral=(0, 1)),
    *_refused("top_n_sigma", "give top_p or min_p", S.LLAMA_CPP, neutral=(-1, -1.0, 0, 0.0)),
    *_refused("adaptive_target", "give top_p or min_p", S.LLAMA_CPP, neutral=(-1, -1.0)),
    *_nothing("dynatemp_exponent mirostat_eta mirostat_tau xtc_threshold dry_base dry_allowed_length "
              "dry_penalty_last_n dry_sequence_breakers adaptive_decay",
              _IS_OFF, S.LLAMA_CPP, S.OLLAMA, routes=GENERATE),
    *_refused("samplers", "the order is fixed", S.LLAMA_CPP),
    *_refused("n_probs", "give logprobs and top_logprobs", S.LLAMA_CPP, neutral=(0,), routes=CHAT),
    *_refused("top_n_tokens", "give logprobs", S.TGI, neutral=(0,)),
    *_refused("post_sampling_probs return_tokens", "give logprobs or return_token_ids", S.LLAMA_CPP, neutral=(False,)),
    *_refused("response_fields", "the answer has the fields that it has", S.LLAMA_CPP),
    *_refused("t_max_predict_ms", "give timeout_s", S.LLAMA_CPP, neutral=(0, -1)),
    *_refused("image_data images video_data audio_data multimodal_data", _NO_MEDIA, S.LLAMA_CPP, S.OLLAMA, S.SGLANG),
    *_refused("think thinking reasoning enable_thinking", "a completion has no template; chats do", S.OLLAMA,
              S.ANTHROPIC, S.OPENROUTER, S.SGLANG, neutral=(False,), routes=COMPLETION),
    *_refused("max_tokens", "give effort: how much is thought cannot be counted beforehand", S.OPENROUTER,
              at="reasoning", routes=CHAT),
    *_nothing("summary generate_summary", "what was thought is told whole", S.OPENAI, S.OPENROUTER, at="reasoning",
              routes=CHAT),
    *_refused("budget_tokens", "give reasoning_effort: how much is thought cannot be counted beforehand", S.ANTHROPIC,
              S.LITELLM, at="thinking", routes=CHAT),
    *_refused("system", "give a message of role system", S.OLLAMA, S.ANTHROPIC),
    *_refused("template", "the model's own is used", S.OLLAMA),
    *_refused("raw", "completions take a prompt as it is", S.OLLAMA, neutral=(False,), routes=CHAT),
    *_nothing("raw", "a prompt is taken as it is", S.OLLAMA, routes=COMPLETION),
    *_refused("context", "send the whole conversation", S.OLLAMA),
    *_refused("transforms", "prompts are not compressed; truncate_prompt_tokens cuts them", S.OPENROUTER),
    *_refused("plugins data_sources", "describe a search as one of the tools", S.OPENROUTER, S.OPENAI),
    *_refused("mock_response", _OUT, S.LITELLM),
    *_refused("return_full_text", "completions have echo", S.TGI, neutral=(False,), routes=CHAT),
    *_refused("details decoder_input_details", "give logprobs", S.TGI, neutral=(False,)),
    *_refused("guideline tool_prompt", "write it into a message", S.TGI),
    *_refused("safe_prompt", "write it into a message", S.MISTRAL, neutral=(False,)),
    *_refused("normalize use_activation", "vectors have unit length", S.VLLM, neutral=(True,), routes=EMBEDDING),
    *_refused("embed_dtype", "vectors are of float32", S.VLLM, neutral=("float32",), routes=EMBEDDING),
    *_refused("endianness", "base64 is of little-endian numbers", S.VLLM, neutral=("native", "little"),
              routes=EMBEDDING),
    *_nothing("input_type task", "the model knows one kind of text", S.LITELLM, routes=EMBEDDING),
    *_refused("return_token_strs with_pieces", "detokenize tells them", S.VLLM, S.LLAMA_CPP, neutral=(False,),
              routes=TOKENIZE),
    *_same("add_special", "add_special_tokens", S.LLAMA_CPP, routes=TOKENIZE),
    # Of messages: what answers of other servers have, and clients send back with the conversation.
    *_works("reasoning_content", S.DEEPSEEK, S.VLLM, S.SGLANG, at=_MESSAGE, routes=(*CHAT, *TOKENIZE)),
    *_works("reasoning", S.VLLM, S.OPENROUTER, at=_MESSAGE, routes=(*CHAT, *TOKENIZE)),
    *_refused("refusal annotations audio function_call", _OUT, S.OPENAI, at=_MESSAGE, routes=(*CHAT, *TOKENIZE)),
    *_refused("images", _NO_MEDIA, S.OLLAMA, S.OPENROUTER, at=_MESSAGE, routes=(*CHAT, *TOKENIZE)),
    *_refused("prefix", "give continue_final_message", S.MISTRAL, S.DEEPSEEK, neutral=(False,), at=_MESSAGE,
              routes=(*CHAT, *TOKENIZE)),
    *_nothing("cache_control", _MARKS, S.ANTHROPIC, S.LITELLM, S.OPENROUTER, at=_MESSAGE),
    *_nothing("reasoning_details thinking_blocks", "reasoning says the same", S.OPENROUTER, S.LITELLM, at=_MESSAGE),
    *_nothing("provider_specific_fields extra_content", _PROXY, S.LITELLM, at=_MESSAGE),
    *_nothing("parsed", "content has the same as text", S.OPENAI, at=_MESSAGE),
    *_nothing("weight", "it is for training", S.OPENAI, at=_MESSAGE),
    *_nothing("id created_at timestamp status citations response_metadata additional_kwargs", _LOG_KEEPS_NONE,
              S.LLAMA_INDEX, S.LITELLM, at=_MESSAGE),
    *_nothing("cache_control", _MARKS, S.ANTHROPIC, S.LITELLM, S.OPENROUTER, at=_PART),
    *_refused("annotations", _OUT, S.OPENAI, at=_PART, routes=(*CHAT, *TOKENIZE)),
    *_nothing("citations id", _LOG_KEEPS_NONE, S.ANTHROPIC, S.LLAMA_INDEX, at=_PART),
    *_nothing("provider_specific_fields extra_content thought_signature", _PROXY, S.LITELLM, at=_CALL),
    *_nothing("parsed_arguments", "arguments has the same as text", S.OPENAI, at=f"{_CALL}.function"),
    *_nothing("provider_specific_fields", _PROXY, S.LITELLM, at=f"{_CALL}.function"),
    # Of tools and formats.
    *_nothing("cache_control", _MARKS, S.ANTHROPIC, S.LITELLM, at=_TOOL),
    *_nothing("cache_control", _MARKS, S.ANTHROPIC, S.LITELLM, at=f"{_TOOL}.function"),
    *_nothing("defer_loading", "the model is told of every tool", S.VLLM, S.ANTHROPIC, at=_TOOL),
    *_nothing("defer_loading", "the model is told of every tool", S.VLLM, S.ANTHROPIC, at=f"{_TOOL}.function"),
    *_nothing("response returns output_schema", "templates show what goes in", S.LLAMA_INDEX, at=f"{_TOOL}.function"),
    *_refused("disable_parallel_tool_use", "give parallel_tool_calls", S.ANTHROPIC, neutral=(False,), at="tool_choice",
              routes=CHAT),
    *_nothing("chunk_include_usage", "continuous_usage_stats is its name", S.VLLM, at="stream_options"),
)  # fmt: skip
