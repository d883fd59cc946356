"""
Flags of llama-server, and what each of them means here.

Rules:
1. A flag *sets* an option of ours, is *idle* (it changes speed only, or nothing here: one line of
   the log says so), is idle with some values *only*, *stands for* other flags, or is *refused*
   with what to use instead, because it changes outputs and is not done here.
2. All flags of the pinned llama-server are here, with their names, negated names, numbers of values
   and variables, and a few that older ones had. tests/cli/test_llama_flags.py compares both, and
   the table of docs/llama-server.md.
3. This file imports little: programs that start llama-server ask for its version and its devices
   first, and wait for the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from pyllama_raw.cli.llama_values import (
    FALSE,
    TRUE,
    Flag,
    IdleFlag,
    Meaning,
    OnlyWith,
    RefusedFlag,
    Sets,
    StandsFor,
    as_is,
    bias,
    breakers,
    cache_bytes,
    drafts,
    effort,
    file_text,
    history,
    idle_seconds,
    json_object,
    keep,
    key_lines,
    layers,
    locking,
    mapping,
    margin,
    named,
    none_if,
    norm,
    overrides,
    pooling,
    positive,
    reasoning_format,
    scaled,
    seconds,
    seed,
    shares,
    stages,
    stages_of_letters,
    switch,
    thinks,
    whole,
    words,
)

INTEGER, NUMBER = int, float
DRAFTS = IdleFlag(
    "how drafts are made follows from measured times: they change speed only"
)
PLACED = IdleFlag("weights lie where they fit (--gpu-layers, --device)")
THREADS = IdleFlag("threads are placed by the system and by libllama")
QUIET = IdleFlag("log lines have one form here")
BY_BODY = "give it in the body of a request"
AGENT = "the server runs no tools: leave it out"
PROXY = "put a proxy in front of the server"
DOWNLOAD = "download the file and give its path"


def flag(spec: str, meaning: Meaning, variable: str = "") -> Flag:
    """
    A flag by its names, negated ones behind a slash, and a word for each of its values.

    Args:
        variable: behind LLAMA_ARG_; all of it, if it begins with "=".
    """
    positives, _, negatives = spec.partition(" / ")
    parts = positives.split()
    names = tuple(part for part in parts if part.startswith("-"))
    if variable:
        variable = variable[1:] if variable[0] == "=" else f"LLAMA_ARG_{variable}"
    negated, n_values = tuple(negatives.split()), len(parts) - len(names)
    return Flag(names, negated, n_values, variable, meaning)


def preset(name: str, meaning: Meaning) -> Flag:
    """A key that only files of presets have."""
    return Flag((name,), (), 1, "preset", meaning)


def _hub(repo: str, file: str = "", **options: object) -> StandsFor:
    """A model of a hub with options that suit it."""
    arguments = ["--hf-repo", f"ggml-org/{repo}"] + ["--hf-file", file] * bool(file)
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return StandsFor(tuple(arguments))


def _coder(size: str, file: str) -> StandsFor:
    sizes = {"port": 8012, "ubatch_size": 1024, "batch_size": 1024, "ctx_size": 0}
    return _hub(f"{size}-Q8_0-GGUF", f"{file}-q8_0.gguf", **sizes)


def _oss(size: str, file: str = "") -> StandsFor:
    sizes = {"port": 8013, "ubatch_size": 2048, "batch_size": 32768, "parallel": 2}
    sampling = {"temp": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.01}
    return _hub(f"gpt-oss-{size}-GGUF", file, **sizes, ctx_size=2**18, **sampling)


KV_TYPES = words(
    **{
        n: n
        for n in (
            "f32",
            "f16",
            "bf16",
            "q8_0",
            "q4_0",
            "q4_1",
            "iq4_nl",
            "q5_0",
            "q5_1",
        )
    }
)
FLASH = words(
    **dict.fromkeys(TRUE, "on"), **dict.fromkeys(FALSE, "off"), auto="auto", _1="auto"
)
LOADING = words(
    auto="auto", none="none", mmap="mmap", mlock="mlock", mmap_mlock="mmap_mlock",
    dio="direct_io",
)  # fmt: skip

# fmt: off
FLAGS: tuple[Flag, ...] = (
    # the process
    flag("-h --help --usage", Sets("own.help", as_is, says="the flags")),
    flag("--version", Sets("own.version", as_is, says="the version")),
    flag("-cl --cache-list", Sets("own.cache_list", as_is, says="models of the cache")),
    flag("--completion-bash", Sets("own.completion", as_is, says="completion for bash")),
    flag("--list-devices", Sets("own.list_devices", as_is, says="the devices")),
    flag("-v --verbose --log-verbose", Sets("own.verbose", as_is, says="all of the log")),
    flag("-lv --verbosity --log-verbosity N", Sets("own.verbosity", INTEGER, says="from 4 on libllama's lines, too"), "LOG_VERBOSITY"),
    flag("--log-file FNAME", Sets("own.log_file", says="the log, in a file, too"), "LOG_FILE"),
    flag("--log-disable", Sets("own.log_disable", as_is, says="no log")),
    flag("--log-jsonl / --no-log-jsonl", QUIET, "LOG_JSONL"),
    flag("--log-prompts-dir PATH", RefusedFlag("prompts are not written: log them in the client")),
    flag("--log-colors WORD", QUIET, "LOG_COLORS"),
    flag("--log-prefix / --no-log-prefix", QUIET, "LOG_PREFIX"),
    flag("--log-timestamps / --no-log-timestamps", QUIET, "LOG_TIMESTAMPS"),
    flag("--perf / --no-perf", IdleFlag("times are always told"), "PERF"),
    flag("--offline", Sets("own.offline", as_is, says="nothing is fetched"), "OFFLINE"),
    # CPUs
    flag("-t --threads N", Sets("context.n_threads", positive), "THREADS"),
    flag("-tb --threads-batch N", Sets("context.n_threads_batch", positive)),
    flag("-C --cpu-mask M", THREADS),
    flag("-Cr --cpu-range RANGE", THREADS),
    flag("--cpu-strict N", THREADS),
    flag("--prio N", THREADS),
    flag("--poll N", THREADS),
    flag("-Cb --cpu-mask-batch M", THREADS),
    flag("-Crb --cpu-range-batch RANGE", THREADS),
    flag("--cpu-strict-batch N", THREADS),
    flag("--prio-batch N", THREADS),
    flag("--poll-batch N", THREADS),
    flag("--numa TYPE", THREADS, "NUMA"),
    # the context
    flag("-c --ctx-size N", Sets("context.n_ctx", INTEGER, says="0: as trained"), "CTX_SIZE"),
    flag("--kv-unified-per-slot N", Sets("own.ctx_per_slot", positive, says="`context.n_ctx`, a slot"), "KV_UNIFIED_PER_SLOT"),
    flag("-b --batch-size N", Sets("context.n_batch", INTEGER), "BATCH"),
    flag("-ub --ubatch-size N", Sets("context.n_ubatch", INTEGER), "UBATCH"),
    flag("--keep N", Sets("scheduler.n_keep", keep)),
    flag("--swa-full", Sets("context.swa_full", as_is), "SWA_FULL"),
    flag("-ctxcp --ctx-checkpoints --swa-checkpoints N", IdleFlag("--cache-ram bounds them"), "CTX_CHECKPOINTS"),
    flag("-cms --checkpoint-min-step N", IdleFlag("the cache chooses its places"), "CHECKPOINT_MIN_SPACING_NT"),
    flag("-cram --cache-ram MIB", Sets("cache.max_bytes", cache_bytes), "CACHE_RAM"),
    flag("-kvu --kv-unified / -no-kvu --no-kv-unified", Sets("context.kv_unified", as_is), "KV_UNIFIED"),
    flag("--cache-idle-slots / --no-cache-idle-slots", IdleFlag("idle slots lend their prefixes until others need the room"), "CACHE_IDLE_SLOTS"),
    flag("--context-shift / --no-context-shift", Sets("scheduler.context_full", lambda on: "shift" if on else "stop"), "CONTEXT_SHIFT"),
    flag("-fa --flash-attn WORD", Sets("context.flash_attn", FLASH), "FLASH_ATTN"),
    flag("-ctk --cache-type-k TYPE", Sets("context.type_k", KV_TYPES), "CACHE_TYPE_K"),
    flag("-ctv --cache-type-v TYPE", Sets("context.type_v", KV_TYPES), "CACHE_TYPE_V"),
    flag("-dt --defrag-thold N", IdleFlag("nothing is to be defragmented"), "DEFRAG_THOLD"),
    flag("-np --parallel N", Sets("scheduler.n_slots", positive), "N_PARALLEL"),
    flag("-cb --cont-batching / -nocb --no-cont-batching", IdleFlag("requests always share steps"), "CONT_BATCHING"),
    flag("--warmup / --no-warmup", Sets("engine.warm_up", as_is)),
    flag("--rope-scaling TYPE", Sets("context.rope_scaling", words(none="none", linear="linear", yarn="yarn")), "ROPE_SCALING_TYPE"),
    flag("--rope-scale N", Sets("context.rope_freq_scale", lambda text: 1 / float(text)), "ROPE_SCALE"),
    flag("--rope-freq-base N", Sets("context.rope_freq_base", NUMBER), "ROPE_FREQ_BASE"),
    flag("--rope-freq-scale N", Sets("context.rope_freq_scale", NUMBER), "ROPE_FREQ_SCALE"),
    flag("--yarn-orig-ctx N", Sets("context.yarn_orig_ctx", INTEGER), "YARN_ORIG_CTX"),
    flag("--yarn-ext-factor N", Sets("context.yarn_ext_factor", NUMBER), "YARN_EXT_FACTOR"),
    flag("--yarn-attn-factor N", Sets("context.yarn_attn_factor", NUMBER), "YARN_ATTN_FACTOR"),
    flag("--yarn-beta-slow N", Sets("context.yarn_beta_slow", NUMBER), "YARN_BETA_SLOW"),
    flag("--yarn-beta-fast N", Sets("context.yarn_beta_fast", NUMBER), "YARN_BETA_FAST"),
    flag("-kvo --kv-offload / -nkvo --no-kv-offload", Sets("context.offload_kqv", as_is), "KV_OFFLOAD"),
    flag("--op-offload / --no-op-offload", Sets("context.op_offload", as_is)),
    flag("-bs --backend-sampling", IdleFlag("the engine chooses the place"), "BACKEND_SAMPLING"),
    # the model and its devices
    flag("-m --model FNAME", Sets("own.model", says="the model"), "MODEL"),
    flag("-mu --model-url URL", RefusedFlag(DOWNLOAD), "MODEL_URL"),
    flag("-dr --docker-repo REPO", RefusedFlag(DOWNLOAD), "DOCKER_REPO"),
    flag("-hf -hfr --hf-repo REPO", Sets("own.hf_repo", says="the model, of Hugging Face"), "HF_REPO"),
    flag("-hff --hf-file FILE", Sets("own.hf_file", says="its file"), "HF_FILE"),
    flag("-hft --hf-token TOKEN", Sets("own.hf_token", says="the token of Hugging Face"), "=HF_TOKEN"),
    flag("-a --alias NAMES", Sets("own.alias", named, says="the name of the model, and other names"), "ALIAS"),
    flag("--tags NAMES", Sets("service.tags", named), "TAGS"),
    flag("--rpc SERVERS", IdleFlag("this machine alone computes"), "RPC"),
    flag("-lm --load-mode MODE", Sets("model.load_mode", LOADING), "LOAD_MODE"),
    flag("-lzm --lazy-mode MODE", Sets("model.lazy_mode", words(on="on", auto="auto", off="off")), "LAZY_MODE"),
    flag("-dev --device NAMES", Sets("model.devices", named), "DEVICE"),
    flag("-ot --override-tensor PATTERNS", PLACED, "OVERRIDE_TENSOR"),
    flag("-cmoe --cpu-moe", PLACED, "CPU_MOE"),
    flag("-ncmoe --n-cpu-moe N", PLACED, "N_CPU_MOE"),
    flag("-ncffn --n-cpu-ffn N", PLACED, "N_CPU_FFN"),
    flag("-ngl --gpu-layers --n-gpu-layers N", Sets("model.n_gpu_layers", layers), "N_GPU_LAYERS"),
    flag("-sm --split-mode MODE", Sets("model.split_mode", words(none="none", layer="layer", row="row", tensor="tensor")), "SPLIT_MODE"),
    flag("-ts --tensor-split SHARES", Sets("model.tensor_split", shares), "TENSOR_SPLIT"),
    flag("-mg --main-gpu INDEX", Sets("model.main_gpu", INTEGER), "MAIN_GPU"),
    flag("-fit --fit WORD", Sets("own.fit", switch, says="`engine.fit_ctx`; off: 0"), "FIT"),
    flag("-fitt --fit-target MIB", Sets("engine.fit_margin_bytes", margin), "FIT_TARGET"),
    flag("-fitc --fit-ctx N", Sets("engine.fit_ctx", INTEGER), "FIT_CTX"),
    flag("--check-tensors", Sets("model.check_tensors", as_is)),
    flag("--override-kv PAIRS", Sets("model.kv_overrides", overrides)),
    flag("--repack / -nr --no-repack", Sets("model.use_extra_bufts", as_is), "REPACK"),
    flag("--no-host", Sets("model.no_host", as_is), "NO_HOST"),
    flag("--lora FILES", Sets("own.adapters", whole, adds=True, says="adapters of all requests")),
    flag("--lora-scaled PAIRS", Sets("own.adapters", scaled, adds=True, says="adapters of all requests")),
    flag("--control-vector FILES", Sets("own.adapters", whole, adds=True, says="adapters of all requests")),
    flag("--control-vector-scaled PAIRS", Sets("own.adapters", scaled, adds=True, says="adapters of all requests")),
    flag("--control-vector-layer-range START END", RefusedFlag("a control vector has all layers")),
    flag("--lora-init-without-apply", Sets("own.adapters_off", as_is, says="adapters that requests do not name are off")),
    # images and sounds
    flag("-mm --mmproj FILE", Sets("media.mmproj"), "MMPROJ"),
    flag("-mmu --mmproj-url URL", RefusedFlag(DOWNLOAD), "MMPROJ_URL"),
    flag("--mmproj-auto / --no-mmproj --no-mmproj-auto", Sets("own.mmproj_auto", as_is, says="no: without `media.mmproj`"), "MMPROJ_AUTO"),
    flag("--mmproj-offload / --no-mmproj-offload", Sets("media.on_device", as_is), "MMPROJ_OFFLOAD"),
    flag("-mmdev --mmproj-device DEVICE", Sets("media.on_device", lambda text: False if text == "none" else None), "=MTMD_BACKEND_DEVICE"),
    flag("--image-min-tokens N", Sets("media.image_min_tokens", positive), "IMAGE_MIN_TOKENS"),
    flag("--image-max-tokens N", Sets("media.image_max_tokens", positive), "IMAGE_MAX_TOKENS"),
    flag("--mtmd-batch-max-tokens N", IdleFlag("images are computed by themselves"), "MTMD_BATCH_MAX_TOKENS"),
    flag("--video-fps N", IdleFlag("there are no videos"), "VIDEO_FPS"),
    flag("--video-timestamp-interval N", IdleFlag("there are no videos"), "VIDEO_TIMESTAMP_INTERVAL"),
    flag("--video-ffmpeg-dir DIR", IdleFlag("there are no videos"), "VIDEO_FFMPEG_DIR"),
    flag("--media-path PATH", Sets("service.media_path")),
    # what requests have that do not say
    flag("-n --predict --n-predict N", Sets("defaults.max_tokens", positive), "N_PREDICT"),
    flag("-r --reverse-prompt PROMPT", Sets("defaults.stop", lambda text: [text], adds=True)),
    flag("-e --escape / --no-escape", IdleFlag("there is no prompt on the command line")),
    flag("-sp --special", RefusedFlag(f"special: true: {BY_BODY}")),
    flag("--spm-infill", Sets("service.suffix_first", as_is)),
    flag("--samplers NAMES", Sets("defaults.stages", stages)),
    flag("-s --seed SEED", Sets("defaults.seed", seed)),
    flag("--sampler-seq --sampling-seq LETTERS", Sets("defaults.stages", stages_of_letters)),
    flag("--ignore-eos", Sets("defaults.ignore_eos", as_is)),
    flag("--temp --temperature N", Sets("defaults.temperature", NUMBER), "TEMPERATURE"),
    flag("--top-k N", Sets("defaults.top_k", INTEGER), "TOP_K"),
    flag("--top-p N", Sets("defaults.top_p", NUMBER), "TOP_P"),
    flag("--min-p N", Sets("defaults.min_p", NUMBER), "MIN_P"),
    flag("--top-nsigma --top-n-sigma N", Sets("defaults.top_n_sigma", none_if(-1.0))),
    flag("--xtc-probability N", Sets("defaults.xtc_probability", NUMBER)),
    flag("--xtc-threshold N", Sets("defaults.xtc_threshold", NUMBER)),
    flag("--typical --typical-p N", Sets("defaults.typical_p", NUMBER)),
    flag("--repeat-last-n N", Sets("defaults.penalty_last_n", history)),
    flag("--repeat-penalty N", Sets("defaults.repeat_penalty", NUMBER), "REPEAT_PENALTY"),
    flag("--presence-penalty N", Sets("defaults.presence_penalty", NUMBER), "PRESENCE_PENALTY"),
    flag("--frequency-penalty N", Sets("defaults.frequency_penalty", NUMBER), "FREQUENCY_PENALTY"),
    flag("--dry-multiplier N", Sets("defaults.dry_multiplier", NUMBER)),
    flag("--dry-base N", Sets("defaults.dry_base", NUMBER)),
    flag("--dry-allowed-length N", Sets("defaults.dry_allowed_length", INTEGER)),
    flag("--dry-penalty-last-n N", Sets("defaults.dry_last_n", history)),
    flag("--dry-sequence-breaker TEXT", Sets("defaults.dry_sequence_breakers", breakers, adds=True)),
    flag("--adaptive-target N", Sets("defaults.adaptive_target", none_if(-1.0))),
    flag("--adaptive-decay N", Sets("defaults.adaptive_decay", NUMBER)),
    flag("--dynatemp-range N", Sets("defaults.dynatemp_range", NUMBER)),
    flag("--dynatemp-exp N", Sets("defaults.dynatemp_exponent", NUMBER)),
    flag("--mirostat N", Sets("defaults.mirostat", INTEGER)),
    flag("--mirostat-lr N", Sets("defaults.mirostat_eta", NUMBER)),
    flag("--mirostat-ent N", Sets("defaults.mirostat_tau", NUMBER)),
    flag("-l --logit-bias TOKEN", Sets("defaults.logit_bias", bias)),
    flag("--grammar GRAMMAR", Sets("defaults.grammar")),
    flag("--grammar-file FNAME", Sets("defaults.grammar", file_text)),
    flag("-j --json-schema SCHEMA", Sets("defaults.json_schema", json_object)),
    flag("-jf --json-schema-file FILE", Sets("defaults.json_schema", lambda path: json_object(file_text(path)))),
    flag("--pooling TYPE", Sets("service.pooling", pooling, says="rank: as the file says"), "POOLING"),
    flag("--embd-normalize N", Sets("own.none", norm, says="2")),
    # chats
    flag("--chat-template TEMPLATE", Sets("model.chat_template"), "CHAT_TEMPLATE"),
    flag("--chat-template-file FILE", Sets("model.chat_template", file_text), "CHAT_TEMPLATE_FILE"),
    flag("--jinja / --no-jinja", IdleFlag("all templates are Jinja"), "JINJA"),
    flag("--chat-template-kwargs JSON", Sets("own.template_kwargs", json_object, says="`service.template_kwargs`"), "CHAT_TEMPLATE_KWARGS"),
    flag("--reasoning-format FORMAT", Sets("service.reasoning_format", reasoning_format), "THINK"),
    flag("-rea --reasoning WORD", Sets("own.template_kwargs.enable_thinking", thinks, says="`service.template_kwargs`"), "REASONING"),
    flag("--reasoning-effort LEVEL", Sets("own.template_kwargs.reasoning_effort", effort, says="`service.template_kwargs`"), "REASONING_EFFORT"),
    flag("--reasoning-budget N", OnlyWith(("-1",), "--reasoning off, or limit n_predict in a request"), "THINK_BUDGET"),
    flag("--reasoning-budget-message MESSAGE", OnlyWith(("",), "there is no budget of thoughts: leave it out"), "THINK_BUDGET_MESSAGE"),
    flag("--reasoning-preserve / --no-reasoning-preserve", Sets("own.template_kwargs.preserve_reasoning", as_is, says="`service.template_kwargs`"), "REASONING_PRESERVE"),
    flag("--skip-chat-parsing / --no-skip-chat-parsing", OnlyWith((False,), f"parse_tool_calls: false: {BY_BODY}"), "SKIP_CHAT_PARSING"),
    flag("--prefill-assistant / --no-prefill-assistant", OnlyWith((True,), "end a chat with a message of the user"), "PREFILL_ASSISTANT"),
    # the server
    flag("--host HOSTS", Sets("own.hosts", named, says="`host`"), "HOST"),
    flag("--port PORT", Sets("listen.port", INTEGER), "PORT"),
    flag("--reuse-port", Sets("own.reuse_port", as_is, says="`reuse_port`"), "REUSE_PORT"),
    flag("--path PATH", OnlyWith(("",), "the page is option file: serve others beside it"), "STATIC_PATH"),
    flag("--cors-origins ORIGINS", Sets("service.cors_origins", named), "CORS_ORIGINS"),
    flag("--cors-methods METHODS", IdleFlag("all methods of the API are allowed"), "CORS_METHODS"),
    flag("--cors-headers HEADERS", IdleFlag("the headers that are asked for are allowed"), "CORS_HEADERS"),
    flag("--cors-credentials / --no-cors-credentials", IdleFlag("origins that are named may send cookies"), "CORS_CREDENTIALS"),
    flag("--api-prefix PREFIX", OnlyWith(("",), PROXY), "API_PREFIX"),
    flag("--ui-config --webui-config JSON", IdleFlag("the page keeps its own"), "UI_CONFIG"),
    flag("--ui-config-file --webui-config-file PATH", IdleFlag("the page keeps its own"), "UI_CONFIG_FILE"),
    flag("--ui-mcp-proxy --webui-mcp-proxy / --no-ui-mcp-proxy --no-webui-mcp-proxy", OnlyWith((False,), AGENT), "UI_MCP_PROXY"),
    flag("--tools TOOLS", OnlyWith(("",), AGENT), "TOOLS"),
    flag("--tools-runtime OPTION", OnlyWith(("",), AGENT), "TOOLS_RUNTIME"),
    flag("--mcp-servers-config PATH", OnlyWith(("",), AGENT), "MCP_SERVERS_CONFIG"),
    flag("--mcp-servers-json JSON", OnlyWith(("",), AGENT), "MCP_SERVERS_JSON"),
    flag("-ag --agent / -no-ag --no-agent", OnlyWith((False,), AGENT), "AGENT"),
    flag("--ui --webui / --no-ui --no-webui", Sets("own.ui", as_is, says="no: without the page"), "UI"),
    flag("--embedding --embeddings", IdleFlag("the model decides"), "EMBEDDINGS"),
    flag("--rerank --reranking", IdleFlag("the model decides"), "RERANKING"),
    flag("--api-key KEYS", Sets("own.api_keys", named, adds=True, says="keys of clients"), "=LLAMA_API_KEY"),
    flag("--api-key-file FNAME", Sets("own.api_keys", key_lines, adds=True, says="keys of clients"), "API_KEY_FILE"),
    flag("--ssl-key-file FNAME", RefusedFlag(PROXY), "SSL_KEY_FILE"),
    flag("--ssl-cert-file FNAME", RefusedFlag(PROXY), "SSL_CERT_FILE"),
    flag("-to --timeout N", Sets("service.send_s", seconds), "TIMEOUT"),
    flag("--sse-ping-interval N", Sets("service.ping_s", seconds), "SSE_PING_INTERVAL"),
    flag("--threads-http N", IdleFlag("option thread answers all"), "THREADS_HTTP"),
    flag("--cache-prompt / --no-cache-prompt", Sets("own.cache", as_is, says="no: `cache.mode` off"), "CACHE_PROMPT"),
    flag("--cache-reuse N", IdleFlag("prefixes are shared; chunks are not moved"), "CACHE_REUSE"),
    flag("--metrics", Sets("own.metrics", as_is, says="with `/metrics`"), "ENDPOINT_METRICS"),
    flag("--props", Sets("own.props", as_is, says="with `POST /props`"), "ENDPOINT_PROPS"),
    flag("--slots / --no-slots", Sets("own.slots", as_is, says="with `/slots`"), "ENDPOINT_SLOTS"),
    flag("--slot-save-path PATH", Sets("service.slot_save_path")),
    flag("-sps --slot-prompt-similarity SHARE", IdleFlag("all slots lend their prefixes")),
    flag("--sleep-idle-seconds SECONDS", Sets("loading.sleep_idle_s", idle_seconds)),
    # many models
    flag("--models-dir PATH", Sets("loading.models_dir"), "MODELS_DIR"),
    flag("--models-preset PATH", Sets("own.presets", says="models of a file, which are loaded when they are asked for"), "MODELS_PRESET"),
    flag("--models-max N", Sets("loading.models_max", INTEGER, says="without it memory alone is a limit"), "MODELS_MAX"),
    flag("--models-autoload / --no-models-autoload", Sets("loading.autoload", as_is), "MODELS_AUTOLOAD"),
    preset("load-on-startup", Sets("own.on_startup", switch, says="the model is loaded at the start")),
    preset("stop-timeout", IdleFlag("all models are in this process")),
    preset("dedup-cache-models", Sets("own.is_listed_once", switch, says="a model of the cache that the preset names is listed once")),
    # drafts of tokens
    flag("-lcs --lookup-cache-static FNAME", DRAFTS),
    flag("-lcd --lookup-cache-dynamic FNAME", DRAFTS),
    flag("--spec-draft-hf -hfd -hfrd --hf-repo-draft REPO", DRAFTS, "SPEC_DRAFT_HF_REPO"),
    flag("--spec-draft-threads -td --threads-draft N", DRAFTS),
    flag("--spec-draft-threads-batch -tbd --threads-batch-draft N", DRAFTS),
    flag("--spec-draft-cpu-mask -Cd --cpu-mask-draft M", DRAFTS),
    flag("--spec-draft-cpu-range -Crd --cpu-range-draft RANGE", DRAFTS),
    flag("--spec-draft-cpu-strict --cpu-strict-draft N", DRAFTS),
    flag("--spec-draft-prio --prio-draft N", DRAFTS),
    flag("--spec-draft-poll --poll-draft N", DRAFTS),
    flag("--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft M", DRAFTS),
    flag("--spec-draft-cpu-strict-batch --cpu-strict-batch-draft N", DRAFTS),
    flag("--spec-draft-prio-batch --prio-batch-draft N", DRAFTS),
    flag("--spec-draft-poll-batch --poll-batch-draft N", DRAFTS),
    flag("--spec-draft-type-k -ctkd --cache-type-k-draft TYPE", DRAFTS, "SPEC_DRAFT_CACHE_TYPE_K"),
    flag("--spec-draft-type-v -ctvd --cache-type-v-draft TYPE", DRAFTS, "SPEC_DRAFT_CACHE_TYPE_V"),
    flag("--spec-draft-override-tensor -otd --override-tensor-draft PATTERNS", DRAFTS),
    flag("--spec-draft-cpu-moe -cmoed --cpu-moe-draft", DRAFTS, "SPEC_DRAFT_CPU_MOE"),
    flag("--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft N", DRAFTS, "SPEC_DRAFT_N_CPU_MOE"),
    flag("--spec-draft-n-max N", DRAFTS, "SPEC_DRAFT_N_MAX"),
    flag("--spec-draft-n-min N", DRAFTS, "SPEC_DRAFT_N_MIN"),
    flag("--spec-synth-len L", DRAFTS, "SPEC_SYNTH_LEN"),
    flag("--spec-synth-rates RATES", DRAFTS, "SPEC_SYNTH_RATES"),
    flag("--spec-draft-p-split --draft-p-split P", DRAFTS, "SPEC_DRAFT_P_SPLIT"),
    flag("--spec-draft-p-min --draft-p-min P", DRAFTS, "SPEC_DRAFT_P_MIN"),
    flag("--spec-draft-backend-sampling / --no-spec-draft-backend-sampling", DRAFTS, "SPEC_DRAFT_BACKEND_SAMPLING"),
    flag("--spec-draft-device -devd --device-draft NAMES", DRAFTS),
    flag("--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft N", DRAFTS, "N_GPU_LAYERS_DRAFT"),
    flag("--spec-draft-model -md --model-draft FNAME", Sets("speculation.draft"), "SPEC_DRAFT_MODEL"),
    flag("--spec-type TYPES", Sets("speculation.mode", drafts, says="`off` by `none`, `mtp` by `draft-mtp`"), "SPEC_TYPE"),
    flag("--spec-ngram-mod-n-min N", DRAFTS),
    flag("--spec-ngram-mod-n-max N", DRAFTS),
    flag("--spec-ngram-mod-n-match N", DRAFTS),
    flag("--spec-ngram-simple-size-n N", DRAFTS),
    flag("--spec-ngram-simple-size-m N", DRAFTS),
    flag("--spec-ngram-simple-min-hits N", DRAFTS),
    flag("--spec-ngram-map-k-size-n N", DRAFTS),
    flag("--spec-ngram-map-k-size-m N", DRAFTS),
    flag("--spec-ngram-map-k-min-hits N", DRAFTS),
    flag("--spec-ngram-map-k4v-size-n N", DRAFTS),
    flag("--spec-ngram-map-k4v-size-m N", DRAFTS),
    flag("--spec-ngram-map-k4v-min-hits N", DRAFTS),
    flag("--spec-default", DRAFTS),
    flag("--draft --draft-n --draft-max N", DRAFTS, "DRAFT_MAX"),
    flag("--draft-min --draft-n-min N", DRAFTS, "DRAFT_MIN"),
    flag("--spec-ngram-size-n N", DRAFTS),
    flag("--spec-ngram-size-m N", DRAFTS),
    flag("--spec-ngram-min-hits N", DRAFTS),
    # models of a hub, with options that suit them
    flag("--embd-gemma-default", _hub("embeddinggemma-300M-qat-q4_0-GGUF", "embeddinggemma-300M-qat-Q4_0.gguf", port=8011, ubatch_size=2048, batch_size=2048, parallel=32, ctx_size=2**16)),
    flag("--fim-qwen-1.5b-default", _coder("Qwen2.5-Coder-1.5B", "qwen2.5-coder-1.5b")),
    flag("--fim-qwen-3b-default", _coder("Qwen2.5-Coder-3B", "qwen2.5-coder-3b")),
    flag("--fim-qwen-7b-default", _coder("Qwen2.5-Coder-7B", "qwen2.5-coder-7b")),
    flag("--fim-qwen-7b-spec", _coder("Qwen2.5-Coder-7B", "qwen2.5-coder-7b")),
    flag("--fim-qwen-14b-spec", _coder("Qwen2.5-Coder-14B", "qwen2.5-coder-14b")),
    flag("--fim-qwen-30b-default", _coder("Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder-30b-a3b-instruct")),
    flag("--gpt-oss-20b-default", _oss("20b", "gpt-oss-20b-mxfp4.gguf")),
    flag("--gpt-oss-120b-default", _oss("120b")),
    flag("--vision-gemma-4b-default", _hub("gemma-3-4b-it-qat-GGUF", port=8014, ctx_size=0)),
    flag("--vision-gemma-12b-default", _hub("gemma-3-12b-it-qat-GGUF", port=8014, ctx_size=0)),
)
# fmt: on

# Flags of llama-servers before the pinned one, which programs still give.
OLDER = (
    flag("--mmap / --no-mmap", Sets("model.load_mode", mapping)),
    flag("--mlock", Sets("model.load_mode", locking)),
    flag(
        "-dio --direct-io / -ndio --no-direct-io", IdleFlag("--load-mode dio says so")
    ),
)


def described() -> Iterator[tuple[str, str]]:
    """For each flag of the table: its names with its variable, and what it means here."""
    for option in FLAGS:
        names = ", ".join(f"`{name}`" for name in (*option.names, *option.negated))
        variable = (
            f" ({option.variable})" if option.variable not in ("", "preset") else ""
        )
        yield names + variable, meaning_of(option.meaning)


def meaning_of(meaning: Meaning) -> str:
    """The words for people of a *meaning*."""
    match meaning:
        case Sets(place="own.none", says=says):
            return f"only {says}: {BY_BODY}"
        case Sets(place=place, says=says) if place.startswith("own."):
            return says or "done"
        case Sets(place=place, says=says):
            return f"`{place}`" + (f"; {says}" if says else "")
        case IdleFlag(reason=reason):
            return f"accepted: {reason}"
        case OnlyWith(values=values, advice=advice):
            texts = " or ".join(json.dumps(value) for value in values)
            return f"accepted as {texts}; else refused: {advice}"
        case StandsFor(arguments=arguments):
            return f"`{' '.join(arguments)}`"
        case RefusedFlag(advice=advice):
            return f"refused: {advice}"
