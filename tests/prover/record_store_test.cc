// Where a serving prover keeps its records: what is served is what it wrote, whatever else lies
// there.
#include "prover/record_store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "attest/base/error.h"
#include "attest/base/sha256.h"
#include "tests/kernels/model/safetensors_writer.h"

namespace bitwitness {
namespace {

namespace fs = std::filesystem;

Bytes record_bytes(std::size_t size) {
  Bytes bytes(size, 0x5a);
  const std::string magic = "bwrecord";
  std::copy(magic.begin(), magic.end(), bytes.begin());
  return bytes;
}

Bytes read_all(StoredRecord record) {
  Bytes out(record.size_bytes());
  record.read(0, out);
  return out;
}

class RecordStoreInADirectory : public ::testing::Test {
 protected:
  fs::path file(const Digest& id) const { return dir_.path() / "records" / (id.hex() + ".bwrec"); }
  // The kind of Error that asking for the record gives.
  ErrorKind failure(const Digest& id) {
    try {
      store_.get(id);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(id.hex()), std::string::npos) << error.what();
      return error.kind();
    }
    ADD_FAILURE() << "it was served";
    return ErrorKind::kUsage;
  }

  test::TempDir dir_;
  RecordStore store_{(dir_.path() / "records").string(), 1 << 20};
  Digest id_ = sha256("record");
};

TEST_F(RecordStoreInADirectory, GivesBackWhatWasPut) {
  EXPECT_FALSE(store_.get(id_));
  store_.put(id_, record_bytes(100'000));
  store_.put_receipt(id_, "receipt");
  std::optional<StoredRecord> found = store_.get(id_);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->receipt(), "receipt");
  Bytes middle(10);
  found->read(50'000, middle);
  EXPECT_EQ(middle, Bytes(10, 0x5a));
  EXPECT_EQ(read_all(std::move(*found)), record_bytes(100'000));
}

TEST_F(RecordStoreInADirectory, ServesNoLinkNoPipeAndNothingElse) {
  test::write_file(dir_.path() / "secret", "bwrecord and what else is nobody's business");
  fs::create_symlink(dir_.path() / "secret", file(id_));
  EXPECT_EQ(failure(id_), ErrorKind::kInfrastructure);
  fs::remove(file(id_));

  ASSERT_EQ(mkfifo(file(id_).c_str(), 0600), 0);
  EXPECT_EQ(failure(id_), ErrorKind::kInfrastructure) << "and does not wait for a writer";
  fs::remove(file(id_));

  fs::create_directory(file(id_));
  EXPECT_EQ(failure(id_), ErrorKind::kInfrastructure);
  fs::remove(file(id_));

  test::write_file(file(id_), "garbage that is longer than a magic");
  EXPECT_EQ(failure(id_), ErrorKind::kInfrastructure);
  test::write_file(file(id_), "bwrec");
  EXPECT_EQ(failure(id_), ErrorKind::kInfrastructure);

  // Larger than any record; sparse, so it costs nothing.
  test::write_file(file(id_), "bwrecord");
  fs::resize_file(file(id_), (std::uintmax_t{4} << 30) + 1);
  EXPECT_EQ(failure(id_), ErrorKind::kInfrastructure);
}

TEST(RecordStore, IsNotPutIntoALogOrAModel) {
  const test::TempDir dir;
  fs::create_directories(dir.path() / "log" / "tile");
  test::write_file(dir.path() / "log" / "checkpoint", "x");
  test::write_file(dir.path() / "log" / "log.vkey", "x");
  fs::create_directories(dir.path() / "model");
  test::write_file(dir.path() / "model" / "config.json", "{}");
  test::write_file(dir.path() / "model" / "model.safetensors", "x");
  for (const char* place : {"log", "log/records", "log/tile/records", "model", "model/records"}) {
    try {
      const RecordStore store((dir.path() / place).string(), 1 << 20);
      ADD_FAILURE() << place;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
    }
    EXPECT_FALSE(fs::exists(dir.path() / "log" / "records")) << "nothing is made there";
  }
  EXPECT_NO_THROW(RecordStore((dir.path() / "records").string(), 1 << 20));
}

}  // namespace
}  // namespace bitwitness
