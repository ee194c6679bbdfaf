// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/mesh.h"

#include <gtest/gtest.h>

#include <set>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::topo;
using Ranks = std::vector<int>;

namespace {

Mesh cube() { return Mesh({{"pp", 2}, {"dp", 2}, {"tp", 2}}, 8); }

template <typename Function>
std::string refusal(Function function) {
  try {
    function();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Usage);
    return error.what();
  }
  return "accepted";
}

std::string refusal(const char* text, int num_ranks) {
  return refusal([&] { Mesh::parse(text, num_ranks); });
}

}  // namespace

TEST(Mesh, RanksAndCoordinatesAreInverse) {
  const Mesh mesh({{"pp", 2}, {"dp", 3}, {"tp", 4}}, 24);
  std::set<Ranks> seen;
  for (int rank = 0; rank < 24; ++rank) {
    const auto at = mesh.coordinates(rank);
    EXPECT_EQ(mesh.rank_at(at), rank);
    seen.insert(at);
  }
  EXPECT_EQ(seen.size(), 24u);
}

TEST(Mesh, LastAxisVariesFastest) {
  EXPECT_EQ(cube().coordinates(6), (Ranks{1, 1, 0}));
  EXPECT_EQ(cube().coordinate(6, "pp"), 1);
  EXPECT_EQ(cube().coordinate(6, "tp"), 0);
  EXPECT_EQ(cube().size("dp"), 2);
  EXPECT_EQ(cube().num_ranks(), 8);
}

TEST(Mesh, GroupKeepsOrderAlongItsAxes) {
  EXPECT_EQ(cube().group(5, "tp"), (Ranks{4, 5}));
  EXPECT_EQ(cube().group(5, "dp"), (Ranks{5, 7}));
  EXPECT_EQ(cube().group(5, "pp"), (Ranks{1, 5}));
  EXPECT_EQ(cube().group(5, {"pp", "dp"}), (Ranks{1, 3, 5, 7}));
  EXPECT_EQ(cube().group(5, {"dp", "pp"}), (Ranks{1, 3, 5, 7}));
  EXPECT_EQ(cube().group(5, {"pp", "dp", "tp"}), (Ranks{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(cube().group(5, {}), (Ranks{5}));
}

TEST(Mesh, GroupsAlongAnAxisCoverEveryRankOnce) {
  const Mesh mesh({{"pp", 2}, {"dp", 3}, {"tp", 2}}, 12);
  std::multiset<int> covered;
  for (int rank = 0; rank < 12; ++rank) {
    const auto group = mesh.group(rank, "dp");
    ASSERT_EQ(group.size(), 3u);
    if (group.front() == rank) covered.insert(group.begin(), group.end());
    EXPECT_EQ(mesh.group(group.back(), "dp"), group);
  }
  EXPECT_EQ(std::set<int>(covered.begin(), covered.end()).size(), 12u);
  EXPECT_EQ(covered.size(), 12u);
}

TEST(Mesh, TextFormSurvivesTheRoundTrip) {
  EXPECT_EQ(cube().text(), "pp=2 x dp=2 x tp=2");
  EXPECT_EQ(Mesh::parse("pp=2 x dp=2 x tp=2", 8), cube());
  EXPECT_EQ(Mesh::parse(" ex = 4 ", 4).text(), "ex=4");
}

TEST(Mesh, OneAxisTakesWhateverIsLeft) {
  EXPECT_EQ(Mesh({{"pp", 2}, {"dp", -1}, {"tp", 2}}, 8), cube());
  EXPECT_EQ(Mesh::parse("dp=-1", 1).size("dp"), 1);
  EXPECT_EQ(
      refusal("pp=3 x dp=-1", 8),
      "mesh pp=3 x dp=-1: the other axes multiply to 3, but 8 ranks divided by 3 leave 2 over; "
      "change them, or start 9 ranks");
  EXPECT_EQ(refusal("pp=-1 x dp=-1", 8),
            "mesh pp=-1 x dp=-1: only one axis can be -1; give the others their sizes");
}

TEST(Mesh, DegreesThatDoNotMultiplyAreRefusedInNumbers) {
  EXPECT_EQ(
      refusal("pp=2 x dp=3 x tp=1", 8),
      "pp=2 x dp=3 x tp=1 = 6, but there are 8 ranks: change a degree so that they multiply to "
      "8, or start 6 ranks");
}

TEST(Mesh, BadAxesAreRefused) {
  EXPECT_EQ(refusal("dp=2 x dp=4", 8),
            "mesh dp=2 x dp=4: axis dp is given twice; name each axis once");
  EXPECT_EQ(refusal("pp=0 x dp=2", 8),
            "mesh pp=0 x dp=2: got pp=0, wanted at least 1, or -1 for whatever is left");
  EXPECT_EQ(refusal("pp=-2", 8),
            "mesh pp=-2: got pp=-2, wanted at least 1, or -1 for whatever is left");
  EXPECT_EQ(refusal([] { Mesh({}, 1); }), "a mesh needs at least one axis, as in dp=4");
  EXPECT_EQ(refusal([] { Mesh({{"dp", 1}}, 0); }), "a mesh needs at least 1 rank, got 0");
  EXPECT_EQ(
      refusal("dp=2 tp=2", 4),
      "mesh 'dp=2 tp=2': got 'dp=2 tp=2', wanted axis=degree; write it as pp=2 x dp=2 x tp=2");
  for (const char* text : {"", "dp", "=2", "dp=", "dp=two", "dp=2 x ", "dp=99999999999"})
    EXPECT_NE(refusal(text, 2), "accepted") << text;
}

TEST(Mesh, EnormousDegreesDoNotOverflow) {
  const int big = 2'000'000'000;
  EXPECT_NE(refusal([&] { Mesh({{"a", big}, {"b", big}, {"c", big}}, 8); }), "accepted");
  EXPECT_NE(refusal([&] { Mesh({{"a", big}, {"b", big}, {"c", big}, {"d", -1}}, 8); }), "accepted");
}

TEST(Mesh, UnknownAxisNamesTheNearest) {
  EXPECT_EQ(refusal([] { cube().size("td"); }),
            "mesh pp=2 x dp=2 x tp=2 has no axis 'td' (did you mean tp?); it has pp, dp, "
            "tp");
  EXPECT_EQ(refusal([] { cube().group(0, "sequence"); }),
            "mesh pp=2 x dp=2 x tp=2 has no axis 'sequence'; it has pp, dp, tp");
}
