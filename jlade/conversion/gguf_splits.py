"""How a text is divided into words, by the names that GGUF files give for it in tokenizer.ggml.pre.

The expressions are those of the models' own tokenizers, as far as llama.cpp names them.
"""
# ruff: noqa: RUF001, letters of many scripts

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_OTHERS_AND_SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = rf"{_ENDINGS}|{_BEFORE}\p{{L}}+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_OTHERS}"
_LONG_BLANKS = "|".join(rf"\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1))

LARGE, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_HAN = r"(?:(?!\p{Han})"


def _cased(endings: str, large: str = LARGE, small: str = SMALL) -> str:
    """Returns an expression for words with large letters at their beginning alone."""
    return f"{_BEFORE}{large}*{small}+{endings}|{_BEFORE}{large}+{small}*{endings}"


_CASED = _cased(f"{_ENDINGS}?")
_CASED_NOT_HAN = _cased(f"{_ENDINGS}?", f"{_NO_HAN}{LARGE})", f"{_NO_HAN}{SMALL})")
_GPT4O = rf"{_CASED}|\p{{N}}{{1,3}}|{_OTHERS_AND_SLASHES}"

LINES = r"[^\n]+|\n+"
IDEOGRAPHS = "[一-龥ࠀ-一가-\ud7ff]+"
_IDEOGRAPHS_AND_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_CODE_AND_WORDS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_CODE_AND_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
_ALPHABETS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-"
    "ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

_OF_LLAMA3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
# Names, and expressions for the words of a text. Each divides the pieces that the one before leaves.
_ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    (
        "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling modern-bert roberta-bpe "
        "jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-de jina-es",
        (_GPT2,),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    (
        f"{_OF_LLAMA3} dbrx smaug-bpe chatglm-bpe glm4 glm5",  # dbrx: Phi-4
        (_LLAMA3,),
    ),
    ("minicpm5", (r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+|{_OTHERS}")),
    (
        "jais-2",
        (
            rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
            rf"{_LONG_BLANKS}|\s{{1,2}}(?!\S)|\s",
        ),
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 "
        "llada-moe",
        (_QWEN2,),
    ),
    ("qwen35", (rf"{_ENDINGS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",)),
    ("laguna", (LINES, _QWEN2)),
    ("ufakzeka", (rf"{_BEFORE}\p{{L}}+|\p{{N}}|{_OTHERS}",)),
    ("seed-coder", (rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_BLANKS}",)),
    (
        "exaone-moe",
        (
            rf"{_ENDINGS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    ("tekken", (rf"{_cased('')}|\p{{N}}|{_OTHERS_AND_SLASHES}",)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", (_GPT4O,)),  # gpt-4o: also Phi-4-mini
    ("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    (
        "youtu",
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
            rf"{_CASED}|\p{{N}}|{_OTHERS_AND_SLASHES}",
        ),
    ),
    ("kimi-k2", (rf"\p{{Han}}+|{_CASED_NOT_HAN}|\p{{N}}{{1,3}}|{_OTHERS}",)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (r"\p{N}{1,3}", _IDEOGRAPHS_AND_KANA, _DEEPSEEK3)),
    (
        "spark2_5",
        (
            r"\p{N}{1,3}",
            _IDEOGRAPHS_AND_KANA,
            rf"{_CODE_AND_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        ),
    ),
    (
        "afmoe",
        (
            r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
            _DEEPSEEK3,
        ),
    ),
    (
        "deepseek-llm",
        (r"[\r\n]", rf"\s?[{_ALPHABETS}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", IDEOGRAPHS, r"\p{N}+"),
    ),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, r"\p{N}")),
    ("bloom poro-chat gpt3-finnish", (r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    ("viking", (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    (
        "chameleon",
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
    ),
)
SPLITS = {name: expressions for names, expressions in _ROWS for name in names.split()}
# A word that is in the vocabulary is one token there, whatever the merges.
WHOLE_WORDS = frozenset(f"{_OF_LLAMA3} glm4 glm5 minicpm5 tekken youtu granite-embed-multi-97m".split())
# Texts begin with the token bos: unless the file says otherwise, or whatever it says.
WITH_BEGIN = frozenset(f"{_OF_LLAMA3} tekken chameleon".split())
ALWAYS_BEGIN = frozenset({"gemma4", "granite-embed-multi-311m"})
# Their own tokenizers join letters and accents; llama.cpp takes a text as it is.
NFC = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35", "command-r", "mpt", "olmo"})
# Merges of characters rather than bytes, with SentencePiece's mark for spaces, within a line.
OF_CHARACTERS = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
