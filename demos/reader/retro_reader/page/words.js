// The page's words.

const number = (value) => value.toLocaleString("en");

export function words(about) {
  const files = number(about.library.documents);
  return {
    on: "with the library", random: "with random passages", off: "alone", switchName: "Library", looked: "What it looked up here", told: "likelier with what it looked up", does: "Looking things up",
    story: (m) => [
      ["It reads a text it has never seen,", `${m} tokens at a time.`],
      ["It looks for similar passages", `in ${files} other documents: its library.`],
      ["It reads what came next there,", "and so guesses what comes next here."],
    ],
    question: (before) => ["It had just read ", before, " and looked for passages like it. Dim: the passage found. Bright: what came next there."],
    none: "No passage was read here: the library is off, this is the first chunk of the text, or no passage is similar enough to the chunk before.",
  };
}
