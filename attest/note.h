// C2SP signed notes (https://c2sp.org/signed-note): text, a blank line, signature lines.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/keys.h"

namespace bitwitness {

constexpr std::size_t kMaxNoteBytes = 1'000'000;
constexpr std::size_t kMaxNoteSignatures = 100;

struct NoteSignature {
  std::string name;
  std::uint32_t key_id = 0;
  Bytes signature;  // without the key id
};

struct Note {
  std::string text;  // ends in a newline
  std::vector<NoteSignature> signatures;
};

// `text` must end in a newline and hold no control characters but newlines (std::invalid_argument).
std::string sign_note(const std::string& text, const std::vector<const SigningKey*>& keys);

// Form only. Any flaw is malformed; `document` names the note.
Note parse_note(std::string_view note, const std::string& document);

// The known keys whose signature on the note is good. Signatures by unknown keys are skipped; a bad
// signature by a known key rejects the note (malformed). Empty means: nobody we know signed it.
std::vector<PublicKey> verify_note(const Note& note, const std::vector<PublicKey>& known,
                                   const std::string& document);

}  // namespace bitwitness
