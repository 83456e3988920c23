// Keys, signed notes and checkpoints.
#include "attest/note.h"

#include <sys/stat.h>
#include <unistd.h>

#include <random>

#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/checkpoint.h"
#include "attest/keys.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::error_kind;
using testing::fixed_key;
using testing::read_text;
using testing::TemporaryDirectory;
using testing::write_text;

// RFC 8032 §7.1, tests 1 to 3.
TEST(Keys, Ed25519PublishedVectors) {
  const struct {
    const char *seed, *key, *message, *signature;
  } vectors[] = {{"9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
                  "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a", "",
                  "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bac"
                  "c61e39701cf9b46b"
                  "d25bf5f0595bbe24655141438e7a100b"},
                 {"4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
                  "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c", "72",
                  "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e"
                  "458f3613d0f11d8c"
                  "387b2eaeb4302aeeb00d291612bb0c00"},
                 {"c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
                  "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025", "af82",
                  "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290"
                  "ae67f760984dc659"
                  "4a7c15e9716ed28dc027beceea1ec40a"}};
  for (const auto& vector : vectors) {
    const SigningKey key = SigningKey::from_seed("rfc8032", *from_hex(vector.seed));
    EXPECT_EQ(to_hex(key.public_key().bytes), vector.key);
    const Bytes message = *from_hex(vector.message);
    const auto signature = key.sign(message);
    EXPECT_EQ(to_hex(signature), vector.signature);
    EXPECT_TRUE(key.public_key().verify(message, signature));
    EXPECT_FALSE(key.public_key().verify(as_bytes("other"), signature));
    EXPECT_FALSE(key.public_key().verify(message, ByteView(signature).first(63)));
  }
}

// The example of the Go documentation of golang.org/x/mod/sumdb/note.
constexpr const char* kPeterVkey =
    "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW";
constexpr const char* kPeterNote =
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "\xe2\x80\x94 PeterNeumann "
    "x08go/ZJkuBS9UG/"
    "SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n";

TEST(Note, PublishedExample) {
  const PublicKey peter = PublicKey::parse_vkey(kPeterVkey);
  EXPECT_EQ(peter.name, "PeterNeumann");
  EXPECT_EQ(peter.key_id(), 0xc74f20a3U);
  EXPECT_EQ(peter.vkey(), kPeterVkey);
  const Note note = parse_note(kPeterNote, "example");
  EXPECT_EQ(verify_note(note, {peter}, "example"), std::vector<PublicKey>{peter});
}

TEST(Note, BadSignatureByAKnownKeyRejects) {
  const PublicKey peter = PublicKey::parse_vkey(kPeterVkey);
  std::string altered = kPeterNote;
  altered[0] = 'i';
  EXPECT_EQ(error_kind([&] { verify_note(parse_note(altered, "n"), {peter}, "n"); }),
            ErrorKind::kMalformed);
  // The same with a good signature of somebody else beside it.
  const SigningKey other = fixed_key("other", 9);
  const Note note = parse_note(altered, "n");
  const std::string both = altered + sign_note(note.text, {&other}).substr(note.text.size() + 1);
  EXPECT_EQ(error_kind([&] {
              verify_note(parse_note(both, "n"), {other.public_key(), peter}, "n");
            }),
            ErrorKind::kMalformed);
  EXPECT_EQ(verify_note(parse_note(both, "n"), {other.public_key()}, "n").size(), 1U);
}

TEST(Note, ManySignaturesAndUnknownKeys) {
  std::vector<SigningKey> keys;
  std::vector<const SigningKey*> pointers;
  for (std::uint8_t i = 0; i < 40; ++i) keys.push_back(fixed_key("key" + std::to_string(i), i));
  for (const SigningKey& key : keys) pointers.push_back(&key);
  const Note note = parse_note(sign_note("text\n\nwith a blank line\n", pointers), "n");
  EXPECT_EQ(note.text, "text\n\nwith a blank line\n");
  EXPECT_EQ(note.signatures.size(), 40U);
  EXPECT_EQ(verify_note(note, {keys[39].public_key()}, "n").size(), 1U);
  EXPECT_TRUE(verify_note(note, {fixed_key("key0", 200).public_key()}, "n").empty());
  for (int i = 0; i < 70; ++i) pointers.push_back(&keys[0]);
  EXPECT_EQ(error_kind([&] { parse_note(sign_note("t\n", pointers), "n"); }),
            ErrorKind::kMalformed);
  const Note twice = parse_note(sign_note("t\n", {&keys[0], &keys[0]}), "n");
  EXPECT_EQ(verify_note(twice, {keys[0].public_key()}, "n").size(), 1U);
}

TEST(Note, IllFormedNotes) {
  const std::string good = kPeterNote;
  const std::string dash = "\xe2\x80\x94 ";
  for (const std::string& bad :
       {std::string(), std::string("\n"), std::string("text\n"), std::string("text\n\n"),
        good.substr(0, good.size() - 1), good + "x\n", good + "\n", "text\n\n" + dash + "name\n",
        "text\n\n" + dash + " AAAAAAAA\n", "text\n\n" + dash + "a+b AAAAAAAA\n",
        "text\n\n" + dash + "name AAAA\n", "text\n\n" + dash + "name AAAAAAA\n",
        "text\n\n" + dash + "name AAAAAAAA \n", std::string("text\n\n- name AAAAAAAA\n"),
        "te\txt\n\n" + dash + "name AAAAAAAA\n", "te\rxt\n\n" + dash + "name AAAAAAAA\n",
        "te\xffxt\n\n" + dash + "name AAAAAAAA\n",
        std::string(1'000'001, 'x') + "\n\n" + dash + "name AAAAAAAA\n"}) {
    EXPECT_EQ(error_kind([&] { parse_note(bad, "n"); }), ErrorKind::kMalformed)
        << bad.substr(0, 100);
  }
  const SigningKey key = fixed_key("k", 1);
  EXPECT_THROW(sign_note("no newline", {&key}), std::invalid_argument);
  EXPECT_THROW(sign_note("tab\t\n", {&key}), std::invalid_argument);
}

TEST(Note, TruncatedOrFlippedNotesNeverVerify) {
  const PublicKey peter = PublicKey::parse_vkey(kPeterVkey);
  const std::string good = kPeterNote;
  const auto verifies = [&](const std::string& text) {
    try {
      return !verify_note(parse_note(text, "n"), {peter}, "n").empty();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kMalformed);
      return false;
    }
  };
  EXPECT_TRUE(verifies(good));
  for (std::size_t i = 0; i < good.size(); ++i) {
    EXPECT_FALSE(verifies(good.substr(0, i)));
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = good;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      EXPECT_FALSE(verifies(changed)) << i << " bit " << bit;
    }
  }
}

TEST(Keys, VerifierKeyStrings) {
  const std::string good = kPeterVkey;
  for (const std::string& bad :
       {std::string(), std::string("PeterNeumann"), good.substr(1), good + "=", good + "\n",
        "P P" + good, std::string("+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"),
        std::string("PeterNeumann+C74F20A3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"),
        std::string("PeterNeumann+c74f20a4+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"),
        std::string("PeterNeumann+c74f20a3+AhpC2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"),
        std::string("PeterNeumann+c74f20a3+ARpc"), good + std::string(2000, 'A')}) {
    EXPECT_EQ(error_kind([&] { PublicKey::parse_vkey(bad); }), ErrorKind::kUsage) << bad;
    EXPECT_EQ(error_kind([&] { PublicKey::parse_vkey(bad, ErrorKind::kMalformed); }),
              ErrorKind::kMalformed);
  }
  for (const char* name : {"a", "log.example.org/x", "\xc3\xa9t\xc3\xa9", "a-b_c:1"}) {
    EXPECT_TRUE(is_key_name(name)) << name;
  }
  for (const char* name : {"", " ", "a b", "a+b", "a\nb", "a\x7f", "\xc2\xa0",
                           "a\xe2\x80\x83"
                           "b",
                           "\xe3\x80\x80", "\xff", "\xc2\x85"}) {
    EXPECT_FALSE(is_key_name(name)) << name;
  }
  EXPECT_EQ(error_kind([&] { SigningKey::generate("a b"); }), ErrorKind::kUsage);
}

TEST(Keys, SaveAndLoad) {
  const TemporaryDirectory dir;
  const std::string path = dir.path("log.pem");
  const SigningKey key = SigningKey::generate("log.example.org/test");
  key.save(path);
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  EXPECT_EQ(read_text(path + ".vkey"), key.public_key().vkey() + "\n");
  EXPECT_TRUE(read_text(path).starts_with("-----BEGIN PRIVATE KEY-----\n"));
  const SigningKey loaded = SigningKey::load(path);
  EXPECT_EQ(loaded.public_key(), key.public_key());
  EXPECT_EQ(loaded.sign(as_bytes("x")), key.sign(as_bytes("x")));
  EXPECT_EQ(PublicKey::load_vkey(path + ".vkey"), key.public_key());
  EXPECT_EQ(PublicKey::load_vkey(key.public_key().vkey()), key.public_key());
  const std::string before = read_text(path);
  EXPECT_EQ(error_kind([&] { SigningKey::generate("n").save(path); }), ErrorKind::kUsage);
  EXPECT_EQ(read_text(path), before);
  SigningKey::generate("n").save(path, true);
  EXPECT_NE(read_text(path), before);
  EXPECT_EQ(SigningKey::load(path).public_key().name, "n");
}

TEST(Keys, BadKeyFiles) {
  const TemporaryDirectory dir;
  const std::string path = dir.path("k.pem");
  EXPECT_EQ(error_kind([&] { SigningKey::load(path); }), ErrorKind::kUsage);
  SigningKey::generate("n").save(path);
  const std::string pem = read_text(path);

  std::string message;
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  EXPECT_EQ(error_kind([&] { SigningKey::load(path); }, &message), ErrorKind::kUsage);
  EXPECT_NE(message.find("chmod 600"), std::string::npos) << message;
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);

  const auto load_kind = [&](const std::string& content) {
    write_text(path, content);
    return error_kind([&] { SigningKey::load(path); });
  };
  for (std::size_t size = 0; size < pem.size() - 2; ++size) {
    ASSERT_EQ(load_kind(pem.substr(0, size)), ErrorKind::kUsage) << size;
  }
  std::mt19937 random(3);
  for (int i = 0; i < 50; ++i) {
    std::string noise(random() % 300, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    ASSERT_EQ(load_kind(noise), ErrorKind::kUsage);
  }
  EXPECT_EQ(load_kind(std::string(20000, 'x')), ErrorKind::kUsage);
  // An X25519 key: well-formed, of the wrong kind.
  EXPECT_EQ(load_kind("-----BEGIN PRIVATE KEY-----\n"
                      "MC4CAQAwBQYDK2VuBCIEIHcHbQpzGKV9PBbBclGyZkXfTC+H68CZKrF3+6UduSwq\n"
                      "-----END PRIVATE KEY-----\n"),
            ErrorKind::kUsage);
  write_text(path, pem);
  SigningKey::load(path);
  // A flipped bit in the vkey, another key's vkey, none.
  const std::string vkey = read_text(path + ".vkey");
  write_text(path + ".vkey", SigningKey::generate("n").public_key().vkey() + "\n");
  EXPECT_EQ(error_kind([&] { SigningKey::load(path); }), ErrorKind::kUsage);
  write_text(path + ".vkey", vkey + vkey);
  EXPECT_EQ(error_kind([&] { SigningKey::load(path); }), ErrorKind::kUsage);
  unlink((path + ".vkey").c_str());
  EXPECT_EQ(error_kind([&] { SigningKey::load(path); }), ErrorKind::kUsage);
}

TEST(Checkpoint, RoundTrip) {
  Checkpoint head{"log.example.org/x", 12345678901234ULL, Digest{}, {}};
  head.root.bytes[0] = 0xfb;
  const SigningKey key = fixed_key("log.example.org/x", 4);
  const std::string note = sign_checkpoint(head, key);
  EXPECT_TRUE(note.starts_with("log.example.org/x\n12345678901234\n+wAAAA"));
  EXPECT_EQ(open_checkpoint(note, key.public_key(), "c"), head);
  EXPECT_EQ(parse_checkpoint(note, "c"), head);
  head.extensions = {"ext 1"};
  EXPECT_EQ(open_checkpoint(sign_checkpoint(head, key), key.public_key(), "c"), head);
  EXPECT_EQ(error_kind([&] {
              open_checkpoint(note, fixed_key("log.example.org/x", 5).public_key(), "c");
            }),
            ErrorKind::kCannotJudge);
  head.origin = "log.example.org/y";
  EXPECT_EQ(error_kind([&] { open_checkpoint(sign_checkpoint(head, key), key.public_key(), "c"); }),
            ErrorKind::kMalformed);
}

TEST(Checkpoint, IllFormedBodies) {
  const std::string root = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n";
  EXPECT_EQ(Checkpoint::parse_body("o\n0\n" + root, "c").size, 0U);
  for (const std::string& bad :
       {std::string(), std::string("o\n"), std::string("o\n1\n"), "\n1\n" + root, "o\n\n" + root,
        "o\n01\n" + root, "o\n-1\n" + root, "o\n+1\n" + root, "o\n1 \n" + root, "o\n0x1\n" + root,
        "o\n18446744073709551616\n" + root, "o\n18446744073709551615\n" + root,
        std::string("o\n1\nAAAA\n"), "o\n1\n" + root.substr(0, root.size() - 1),
        std::string("o\n1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAB=\n"), "o\n1\n" + root + "\n",
        "o\n1\n" + root + "no newline"}) {
    EXPECT_EQ(error_kind([&] { Checkpoint::parse_body(bad, "c"); }), ErrorKind::kMalformed) << bad;
  }
}

}  // namespace
}  // namespace bitwitness
