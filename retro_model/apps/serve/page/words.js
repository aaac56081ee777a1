// The page's words for each kind of model.

const number = (value) => value.toLocaleString("en");

export function words(about) {
  const files = about.library ? number(about.library.documents) : "";
  const retro = {
    on: "with the library", random: "with random passages", off: "alone", switchName: "Library", looked: "What it looked up here", told: "likelier with what it looked up", does: "Looking things up",
    story: (m) => [
      ["It reads a text it has never seen,", `${m} tokens at a time.`],
      ["It looks for similar passages", `in ${files} other documents: its library.`],
      ["It reads what came next there,", "and so guesses what comes next here."],
    ],
    question: (before) => ["It had just read ", before, " and looked for passages like it. Dim: the passage found. Bright: what came next there."],
    none: "No passage was read here: the library is off, this is the first chunk of the text, or no passage is similar enough to the chunk before.",
  };
  return {
    retro, retrofit: retro,
    rpt: {
      ...retro, on: "with its own past", off: "window alone", switchName: "Own past", looked: "What it recalled from this text",
      told: "likelier with the text's own past", does: "Looking back",
      story: (m) => [
        ["It reads a long text it has never seen,", `${m} tokens at a time, through a window.`],
        ["It looks back further than the window,", "for an earlier passage of the same text."],
        ["It reads what came next there,", "and so guesses what comes next here."],
      ],
      question: (before) => ["It had just read ", before, " and recalled these passages from further back. Dim: the passage. Bright: what came next."],
      none: "Nothing lies further back than the window yet.",
    },
    mosaics: {
      ...retro, on: "remembering all of it", off: "16 tokens alone", switchName: "Memories", looked: "What each memory recalled",
      told: "likelier with all that it remembers", does: "Remembering all of it",
      story: () => [
        ["It reads a text it has never seen.", "Each of its memories keeps what followed every place."],
        ["Where a context returns,", "the memories recall the places like it."],
        ["What followed there is their vote", "for what comes next here."],
      ],
      none: "Point at a word: the places that the memories recalled light up in the text.",
    },
  }[about.kind];
}
